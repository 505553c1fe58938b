"""Profiler processes: protocol, child, exit status."""
