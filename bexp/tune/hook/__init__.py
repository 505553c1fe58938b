"""The folder that leads PYTHONPATH in a training command that is tuned."""
