"""The portable kernels: every recipe in Triton, from Ampere to Blackwell. Importing this loads
nothing.
"""
