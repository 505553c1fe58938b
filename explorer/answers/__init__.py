"""The answer as text for people."""
