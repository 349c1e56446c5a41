"""Kernels beside exact attention on one device: checked, then timed; and the file that says so."""
