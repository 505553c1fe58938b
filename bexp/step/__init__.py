"""Finds the best micro-batch size for any training step, by measuring it in the training process itself."""
