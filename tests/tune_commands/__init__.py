"""Training commands as people write them, for `bexp tune`."""
