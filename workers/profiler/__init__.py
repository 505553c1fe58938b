"""The process that owns one device, builds blocks of a model, and measures their time and memory."""
