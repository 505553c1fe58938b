"""Micro-batch sizes of any training step, measured in the training process itself."""
