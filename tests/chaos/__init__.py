"""Faults at random against real processes of the service, and what must hold afterwards."""
