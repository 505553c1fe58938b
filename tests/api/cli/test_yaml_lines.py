"""Values of a YAML are changed where they stand, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.api.cli.yaml_lines import UnchangeableError, change_values

AXOLOTL = """\
# what is trained
base_model: a/b   # a model
datasets:
  - path: c
    micro_batch_size: 1  # not this one

gradient_accumulation_steps: 4   # times two
"micro_batch_size":    2 # fits
deepspeed: {micro_batch_size: 7}
note: |
  micro_batch_size: 9
learning_rate: 2e-4
"""


def test_comments_order_and_look_alikes_stay() -> None:
    changed = change_values(AXOLOTL, {"micro_batch_size": 8, "gradient_accumulation_steps": 1})
    before, after = AXOLOTL.splitlines(), changed.splitlines()
    differs = {old: new for old, new in zip(before, after, strict=True) if old != new}
    assert differs == {
        "gradient_accumulation_steps: 4   # times two": "gradient_accumulation_steps: 1   # times two",
        '"micro_batch_size":    2 # fits': '"micro_batch_size":    8 # fits',
    }


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("a: 1", "a: 1\nsize: 8\n"),
        ("size:  # none yet\na: 1\n", "size: 8  # none yet\na: 1\n"),
        ("size: '2'\r\na: 1\r\n", "size: 8\r\na: 1\r\n"),
        ("a: 1\r\n", "a: 1\r\nsize: 8\r\n"),
        ("---\nsize: 2\nsize: 4\n", "---\nsize: 8\nsize: 8\n"),
        ("{a: 1, size: 2}  # flow\n", "{a: 1, size: 8}  # flow\n"),
        ("size: &n 2\na: 1\n", "size: 8\na: 1\n"),
        ("größe: 'ß'\nsize: 2\n", "größe: 'ß'\nsize: 8\n"),
        ("text: >-\n  long\n", "text: >-\n  long\nsize: 8\n"),
        ("size: [1,\n  2]\na: 1\n", "size: 8\na: 1\n"),
        ("b: 1\nsize:\n  - 1\n  - 2\n\na: 1\n", "b: 1\nsize:\n  8\n\na: 1\n"),
        ("a: 1\nsize: {b: 2}  # flow\n", "a: 1\nsize: 8  # flow\n"),
    ],
)
def test_a_value_may_be_missing_quoted_or_twice(text: str, changed: str) -> None:
    assert change_values(text, {"size": 8}) == changed


@pytest.mark.parametrize(
    ("value", "shown"),
    [(True, "true"), ("adafactor", "adafactor"), ("true", "'true'"), ("a b " * 50 + "c",) * 2, ([1], "[1]")],
)
def test_a_value_keeps_its_type(value: Any, shown: str) -> None:
    assert change_values("a: 1\n", {"size": value}) == f"a: 1\nsize: {shown}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- size\n", "no mapping"),
        ("size: [\n", "it is no YAML: while parsing"),
        ("", "no mapping"),
        ("a: 1\n---\nsize: 2\n", "it is no YAML: expected a single document"),
        ("size: &n 2\nother: *n\n", "size cannot be changed in it"),
        ("other: &n 2\nsize: *n\n", "size cannot be changed in it"),
        ("{a: 1}\n", "size cannot be changed in it"),
        ("a: 1\n...\n", "size cannot be changed in it"),
    ],
)
def test_what_cannot_be_changed_line_by_line_is_refused(text: str, said: str) -> None:
    with pytest.raises(UnchangeableError, match=said):
        change_values(text, {"size": 8})
