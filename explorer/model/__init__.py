"""What a model, its texts, its training, its routing and a device are: plain values."""
