"""The whole of what is asked, and its rules."""
