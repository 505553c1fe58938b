"""Recorded tables of a request's measurements on a device, and a device that answers from such a table."""
