"""What a change of the kernels must be measured with again on a GPU: one command, one archive."""
