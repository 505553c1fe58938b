"""The tools of a trial: the instruments of a device, phases, ranks, failures, and usable back ends."""
