"""The process that owns one device: it builds blocks of a model, and measures their time and memory."""
