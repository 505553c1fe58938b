"""Commands that produce every published performance figure. results/ holds the raw JSON."""
