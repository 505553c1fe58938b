from __future__ import annotations

import pytest

from explorer.formats.document import MAX_BYTES, MAX_DEPTH, FormatError, load_document


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, "b": [true, null, 1.5, "x"]}', {"a": 1, "b": [True, None, 1.5, "x"]}),
        ("a: 1\nb:\n  - c: x\n", {"a": 1, "b": [{"c": "x"}]}),
        ("{a: 1, b: [2]}", {"a": 1, "b": [2]}),
        ("\ufeffa: 1", {"a": 1}),
        ("day: 2026-11-20", {"day": "2026-11-20"}),
        ("<<: {a: 1}", {"<<": {"a": 1}}),
        ("# only\na: {}", {"a": {}}),
    ],
)
def test_plain_documents(text: str, expected: dict[str, object]) -> None:
    assert load_document(text) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        ("- 1", "must be a mapping"),
        ("just text", "must be a mapping"),
        ("[1, 2]", "must be a mapping"),
        ("a: 1\na: 2", "duplicate key 'a' in line 2"),
        ("a: {b: 1, b: 2}", "duplicate key 'b'"),
        ('{"a": {"b": 1, "b": 2}}', "duplicate key 'b'"),
        ("a: &x [1]\nb: 2", "anchor &x in line 1"),
        ("a: &x [1]\nb: *x", "anchor &x in line 1"),
        ("b: *x", "alias *x in line 1"),
        ("a: !!python/object/apply:os.system ['true']", "tag"),
        ("a: !local 1", "tag"),
        ("a: 1\n---\nb: 1", "second document starts in line 2"),
        ("a: [1", "not valid YAML in line"),
        ('{"a": 1,,}', "not valid JSON"),
        ("1: a", "must be text"),
        ("on: a", "must be text"),
        ("? [a]\n: 1", "not valid YAML"),
        ("a: .nan", "a: must be a finite number"),
        ('{"a": {"b": [1, NaN]}}', "a.b.1: must be a finite number"),
        ('{"a": -Infinity}', "a: must be a finite number"),
        ('{"a": 1e999}', "a: must be a finite number"),
        ('{"a": "\\ud800"}', "lone surrogate"),
        ('{"\\udfff": 1}', "lone surrogate"),
        ('a: "\\0"', "NUL"),
        ("a: " + "9" * 5000, "too many digits"),
        ('{"a": ' + "9" * 5000 + "}", "too many digits"),
        ("a: \x07", "not valid YAML"),
    ],
)
def test_refusals(text: str, part: str) -> None:
    with pytest.raises(FormatError) as caught:
        load_document(text)
    assert part in str(caught.value)


@pytest.mark.parametrize("opening", ["[", '{"a":', "{a: "])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 5000, 50_000])
def test_deep_nesting_is_refused_before_it_recurses(opening: str, depth: int) -> None:
    closing = "]" if opening == "[" else "}"
    prefix = "a: " if opening == "[" else ""
    with pytest.raises(FormatError, match=r"nested deeper|larger than"):
        load_document(prefix + opening * depth + "1" + closing * depth)


def test_nesting_up_to_the_cap() -> None:
    assert load_document("a: " + "[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2))


def test_size_counts_bytes() -> None:
    filler = "é" * (MAX_BYTES // 2)
    with pytest.raises(FormatError, match="larger than 256 KiB"):
        load_document(f"a: {filler}")
    assert load_document(f"a: {'e' * (MAX_BYTES // 2)}")


def test_locations_are_kept_apart_from_messages() -> None:
    with pytest.raises(FormatError) as caught:
        load_document('{"a": [{"b": NaN}], "c": Infinity}')
    assert caught.value.errors == [
        (("a", 0, "b"), "must be a finite number"),
        (("c",), "must be a finite number"),
    ]
