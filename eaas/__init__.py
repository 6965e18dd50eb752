"""Disaggregated expert serving for Mixture-of-Experts models."""
