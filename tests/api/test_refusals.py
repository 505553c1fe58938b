"""What refuses a request repeats of it what can be read, and no more than a line."""

from __future__ import annotations

import pytest

from bexp.api.refusals import invalid_body, readable, refusal_of
from bexp.storage.jobs import JobNotFoundError
from bexp.storage.quotas import QueuedQuotaError, StoredQuotaError
from bexp.storage.schema import NewerSchemaError


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


@pytest.mark.parametrize(
    ("error", "status", "detail", "seconds"),
    [
        (QueuedQuotaError("a", 7), 429, "has as many queued explorations as its quota 'queued' allows (7).", "30"),
        (
            StoredQuotaError("a", 1_500_000, 12_345_678_900),
            403,
            "take 12,345.7 MB, and its quota 'stored' is 1.5 MB.",
            None,
        ),
        (NewerSchemaError(), 503, "", "30"),
        (JobNotFoundError("x"), 404, "There is no exploration with this id.", None),
    ],
)
def test_a_refusal_says_what_is_too_much_and_when_to_come_again(
    error: Exception, status: int, detail: str, seconds: str | None
) -> None:
    refused = refusal_of(error)
    assert refused is not None
    assert (refused.status, (refused.headers or {}).get("Retry-After")) == (status, seconds)
    assert detail in refused.detail


def test_a_body_with_many_errors_is_refused_with_a_hundred_of_them_each_with_its_place() -> None:
    refused = invalid_body([(("a/b", 3, "~"), "x" * 600), ((), "y"), *[(("c",), "z")] * 200])
    (long,) = invalid_body([(("x" * 65,), "y")]).errors
    assert long.field == "x" * 63 + "\N{HORIZONTAL ELLIPSIS}"
    first, second, *others = refused.errors
    assert (first.field, first.pointer, len(first.message)) == ("a/b.3.~", "#/a~1b/3/~0", 500)
    assert (second.field, second.pointer, second.message) == (None, None, "y")
    assert len(others) == 98
