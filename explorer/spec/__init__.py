"""The specification of an exploration: model, training, routing, hardware, candidate, request."""
