"""The attention worker on a GPU: its kernels in Triton, its weights and its decoder."""
