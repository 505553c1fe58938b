"""Code that a training command loads while it is tuned: it sets the size of micro-batches, and measures steps."""
