"""Devices: discovery, selection, lock."""
