"""Faults injected on purpose, by hand or by plan."""
