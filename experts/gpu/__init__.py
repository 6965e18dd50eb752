"""The expert service on a GPU: kernels in Triton, and the ends of its protocol in device memory."""
