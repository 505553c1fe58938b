"""Puts generated tables into README.md and docs/, from the raw JSON under results/ and from the request's schema."""
