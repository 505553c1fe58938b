"""The code whose training step is measured."""
