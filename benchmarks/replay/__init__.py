"""Searches replayed on recorded tables, and compared with what people use instead."""
