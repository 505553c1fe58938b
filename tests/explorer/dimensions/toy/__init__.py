"""A toy dimension as a person would add it: its file, its half with torch, and its entries of the list."""
