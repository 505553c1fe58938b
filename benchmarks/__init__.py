"""What backs the performance figures of the README. Each module is a command; results/ holds the raw JSON."""
