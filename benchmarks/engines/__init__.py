"""Engines that benchmarks compare, each a process of its own that sleeps while another is measured."""
