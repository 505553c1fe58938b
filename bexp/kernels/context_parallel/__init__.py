"""Exact attention over sequences that are spread over several devices."""
