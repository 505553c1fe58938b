"""What refuses a request repeats of it what can be read, and no more than a line."""

from __future__ import annotations

import pytest

from bexp.api.refusals import readable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("12345", "12345"),
        ("123456", "1234\N{HORIZONTAL ELLIPSIS}"),
        ("a\n\ud800", "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"),
        ("1234\n6789", "1234\N{HORIZONTAL ELLIPSIS}"),
    ],
)
def test_a_text_is_cut_and_without_control_characters(text: str, shown: str) -> None:
    assert readable(text, 5) == shown
