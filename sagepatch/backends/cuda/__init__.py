"""Kernels in CUDA C++, compiled at run time."""
