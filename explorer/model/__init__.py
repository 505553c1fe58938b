"""A model, its texts, its training, its routing and a device, as plain values."""
