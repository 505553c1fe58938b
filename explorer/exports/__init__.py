"""Exports of answers: the candidate for a trainer, and the header of its file; trainers write the files."""
