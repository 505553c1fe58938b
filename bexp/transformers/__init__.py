"""Settings of a model of the transformers library, for training it and for measuring it."""
