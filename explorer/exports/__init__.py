"""Answers out: which candidate a trainer runs, and what is said above its file; trainers write the files."""
