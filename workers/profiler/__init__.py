"""The process that owns one device: builds blocks of a model, times and weighs them, and says what it found."""
