"""A profiler of several devices of a host: a process for each device, and one that starts and coordinates them."""
