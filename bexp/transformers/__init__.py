"""What is set on a model of the transformers library, for training it and for measuring it."""
