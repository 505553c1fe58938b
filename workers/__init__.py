"""What owns devices: claims jobs and profiles candidates. The only place that imports torch."""
