"""Stored records: measurements, trials, recommendations, events."""
