"""Jobs: claim, run, heartbeat, timings."""
