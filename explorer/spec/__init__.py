"""What is asked: model, training, routing, hardware, candidate, request."""
