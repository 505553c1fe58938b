"""What runs in a training process: kernels, measuring."""
