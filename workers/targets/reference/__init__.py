"""The model in torch: the blocks that are timed by themselves, and the whole decoder of them."""
