"""Micro-steps of a training loop as CUDA graphs."""
