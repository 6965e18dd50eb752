"""Checks and times of the GPU data path on a real GPU: `make gpu`, or `python -m benchmarks.gpu`."""
