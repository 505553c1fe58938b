"""A request: its fields, and the rules between them."""
