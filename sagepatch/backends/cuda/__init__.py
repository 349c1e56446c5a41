"""The peak backend: CUDA C++ kernels compiled at run time, no toolkit needed."""
