from __future__ import annotations

import time

import pytest

from bexp.explorer.formats.document import MAX_BYTES, MAX_DEPTH, FormatError, load_document


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        ("- 1", "must be a mapping"),
        ("a: 1\na: 2", "duplicate key 'a' in line 2"),
        ('{"a": {"b": 1, "b": 2}}', "duplicate key 'b'"),
        ("b: *x", "alias *x in line 1 has no anchor"),
        ("a: [*x]\nb: &x 1", "alias *x in line 1 has no anchor"),
        ("a: &x [1, {b: *x}]", "alias *x in line 1 stands for what contains it"),
        ("a: &x 1\nb: &x 2", "anchor &x in line 2 is given a second time"),
        ("<<: 3", "expected a mapping"),
        ("a: {b: 1, <<: {c: 1}, <<: {d: 1}}", "duplicate key '<<' in line 1"),
        ("a: &x {b: 1, b: 2}\nc: {<<: *x}", "duplicate key 'b' in line 1"),
        ("--num-layers \0", "NUL"),
        ("a: !!python/object/apply:os.system ['true']", "tag"),
        ("a: !local 1", "tag"),
        ("a: 1\n---\nb: 1", "second document starts in line 2"),
        ("a: [1", "not valid YAML in line"),
        ('{"a": 1,,}', "not valid JSON"),
        ("1: a", "must be text"),
        ("? [a]\n: 1", "not valid YAML"),
        ("a: .nan", "a: must be a finite number"),
        ('{"a": {"b": [1, NaN]}}', "a.b.1: must be a finite number"),
        ('{"a": -Infinity}', "a: must be a finite number"),
        ('{"a": 1e999}', "a: must be a finite number"),
        ('{"a": "\\ud800"}', "lone surrogate"),
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


def test_merge_keys_mean_what_yaml_1_1_says() -> None:
    """A mapping's own keys go before merged ones, and an earlier mapping of a list before a later one."""
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {x: 3, <<: *b}\nd: {<<: [{y: 9, z: 9}, *b]}\ne: {<<: *b}"
    document = load_document(text)
    assert document["b"] == document["e"] == {"x": 2, "y": 1}
    assert (document["c"], document["d"]) == ({"x": 3, "y": 1}, {"x": 2, "y": 9, "z": 9})


BOMBS = {
    "values": "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)),
    "text": f"a: &a {'x' * 100_000}\nb: [*a, *a, *a]",
    "depth": "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, MAX_DEPTH)),
    "merges": "a0: &a0 {k: 1}\n"
    + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 10)),
}


@pytest.mark.parametrize(
    ("name", "message"),
    [("values", "more than 20,000"), ("text", "larger than"), ("depth", "nested deeper"), ("merges", "more than")],
)
def test_a_document_is_as_large_as_what_its_aliases_stand_for(name: str, message: str) -> None:
    seconds = []
    for _ in range(3):  # another program on the core, or a collection of garbage, makes one run slower
        began = time.process_time()
        with pytest.raises(FormatError, match=message):
            load_document(BOMBS[name])
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.05
