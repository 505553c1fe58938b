"""What the notes of an answer say."""

from __future__ import annotations

from bexp.explorer.records.recommendation import Recommendation


def notes_of(best: Recommendation) -> list[str]:
    """Return the texts of an answer's notes."""
    return [note.text for note in best.notes]
