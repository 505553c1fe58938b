"""Searches on devices and models that nothing was tuned to, all drawn from a seed."""
