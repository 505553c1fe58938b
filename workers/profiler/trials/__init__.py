"""The kinds of trials, one module each."""
