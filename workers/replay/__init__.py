"""Recorded tables: what a device once measured of a request, and a device that answers from it."""
