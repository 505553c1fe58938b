"""A misspelt name is refused when it is submitted, with its field and the names that there are, whatever the field."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from bexp.explorer.dimensions.loss import LOSSES
from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.request import parse_request
from bexp.explorer.request.request import ExplorationRequest

EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_hidden_size": 32}
MODEL = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64}
TYPO = "nonsens"
SCHEMA = ExplorationRequest.model_json_schema()
OPEN = {
    *("labels", "model.name", "notices", "target"),
    *(f"training.lora.{name}" for name in ("target_modules", "target_parameters", "modules_to_save")),
}
"""Fields whose names somebody else chooses: a person, a worker that registers a target, or a model's code."""
WRITTEN_ELSEWHERE = {"parallelism.context": "context_parallel.sizes", "parallelism.sharding": "training.sharding"}
BACKENDS = {"attention_backends[]": {"flash", "math"}, "expert_backends[]": {"grouped_mm", "loop"}}
"""Their names depend on the target."""
OF_PYDANTIC = re.compile(r"\[|<|Tuple|constrained|str-enum|DType", re.ASCII)


def named_fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each field that takes names, `losses[]` if it takes a list of them, and those that its schema has."""
    schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    names = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if schema.get("type") == "string" or names:
        yield path, names
    for member in schema.get("anyOf", schema.get("oneOf", [])):
        yield from named_fields(member, path)
    if schema.get("type") == "array" and "items" in schema:
        yield from named_fields(schema["items"], f"{path}[]")
    for name, field in schema.get("properties", {}).items():
        yield from named_fields(field, f"{path}.{name}" if path else name)


NAMES: defaultdict[str, set[str]] = defaultdict(set, BACKENDS)
for _field, _names in named_fields(SCHEMA):
    if _field.removesuffix("[]") not in OPEN:
        NAMES[_field] |= {*_names}


def test_the_fields_with_names_are_found() -> None:
    assert {"losses[]", "executions[]", "kernels[]", "trainer", "training.optimizer.name"} <= NAMES.keys()
    assert {"expert_backends[]", "recompute[]", "parallelism.schedule", "context_parallel.layouts[]"} <= NAMES.keys()


@pytest.mark.parametrize("field", NAMES)
def test_a_misspelt_name_is_refused_with_those_that_there_are(field: str) -> None:
    name, is_list = field.removesuffix("[]"), field.endswith("[]")
    document: dict[str, Any] = {"model": {**MODEL, "seq_length": 16, "moe": EXPERTS}}
    *parents, last = name.split(".")
    place = document
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = [TYPO] if is_list else TYPO
    with pytest.raises(FormatError) as refused:
        parse_request(document)
    said = {".".join(map(str, location)).removesuffix(".0"): message for location, message in refused.value.errors}
    message = said[WRITTEN_ELSEWHERE.get(name, name)]
    assert NAMES[field]
    assert not [known for known in NAMES[field] if known not in message]
    assert not any(OF_PYDANTIC.search(f"{where} {what.replace('[a, b]', '')}") for where, what in said.items())


@pytest.mark.parametrize(
    ("changes", "errors"),
    [
        ({"recompute": []}, [(("recompute",), "must have at least 1 item, not 0")]),
        (
            {"losses": ["library"] * (len(LOSSES) + 1)},
            [(("losses",), f"must have at most {len(LOSSES)} items, not {len(LOSSES) + 1}")],
        ),
        ({"kernels": ["liger", "x"]}, [(("kernels", 1), "must be 'library' or 'liger'")]),
        (
            {"parallelism": {"tensor": "x"}},
            [(("parallelism", "tensor"), "must be 'explore', or a valid integer, or a list, such as [a, b]")],
        ),
        (
            {"parallelism": {"schedule": ["1f1b", "x"]}},
            [(("parallelism", "schedule", 1), "must be '1f1b' or 'interleaved'")],
        ),
        (
            {"training": {"optimizer": {"master_dtype": "x"}}},
            [(("training", "optimizer", "master_dtype"), "must be 'float32'")],
        ),
    ],
)
def test_what_is_said_of_a_value_is_one_sentence_in_plain_words(changes: dict[str, Any], errors: list[Any]) -> None:
    with pytest.raises(FormatError) as refused:
        parse_request({"model": {**MODEL, "seq_length": 16}, **changes})
    assert refused.value.errors == errors
