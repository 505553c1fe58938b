"""A client of a bexp service for Python programs and notebooks. It needs httpx, and nothing of the service."""
