"""A target that a person has written: measured whole, in a process that imports nothing of the service."""
