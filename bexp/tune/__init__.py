"""What a training command loads while it is tuned: it sets the size of its micro-batches, and measures its steps."""
