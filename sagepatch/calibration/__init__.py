"""Measures each layer's kernels on its own live inputs and chooses the fastest that its error
allows.
"""
