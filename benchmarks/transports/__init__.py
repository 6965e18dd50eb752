"""Ways to move bytes between processes, all measured alike: see `benchmarks.p2p`."""
