"""The answer as text for a person."""
