"""Timing, memory and the conditions of a device."""
