"""One profiler on several devices of a host: a process for each, and one that starts them and speaks for them."""
