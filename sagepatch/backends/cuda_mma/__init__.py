"""CUDA C++ kernels on mma.sync, for every GPU from Ampere to consumer Blackwell, compiled at run
time. Loaded by name where they are used.
"""
