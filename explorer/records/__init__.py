"""What is stored: measurements, trials, recommendations, events."""
