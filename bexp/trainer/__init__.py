"""What goes into a trainer: a recommendation as it is read, applied to a model, and reported back."""
