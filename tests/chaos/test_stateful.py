"""Short sequences of calls, compared with the model; and that the model sees what is wrong."""

from __future__ import annotations

import pytest

from bexp.storage import submission
from tests.chaos.stateful import search


def test_explorations_do_what_their_model_says() -> None:
    search(8, 25, derandomize=True)


def test_a_forgotten_key_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(1_000_000))
    monkeypatch.setattr(submission, "stored_key", lambda owner, key: f"{owner} {key} {next(numbers)}")
    with pytest.raises(AssertionError):
        search(25, 30, derandomize=True, shrinks=False)
