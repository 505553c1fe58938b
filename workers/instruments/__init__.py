"""What a trial measures with: the instruments of a device, phases, ranks, failures, and usable back ends."""
