"""A recommendation in a training process: read, applied to a model, and reported back."""
