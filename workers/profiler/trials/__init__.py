"""One module a kind of trial."""
