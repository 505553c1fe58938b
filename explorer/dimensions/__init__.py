"""The dimensions of a candidate: one file for each."""
