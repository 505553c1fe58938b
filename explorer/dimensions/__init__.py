"""What a candidate chooses: one file a dimension."""
