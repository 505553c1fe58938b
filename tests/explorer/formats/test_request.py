from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.request import parse_request
from tests.explorer.shapes import shapes

MODEL = shapes(2, 64, 128, heads=4, vocab=100, length=32)

MOE = {"num_experts": 4, "top_k": 2, "expert_ffn_hidden_size": 32}


def refusal(document: Any, **overrides: Any) -> list[tuple[tuple[str | int, ...], str]]:
    with pytest.raises(FormatError) as caught:
        parse_request(document, overrides=overrides)
    return caught.value.errors


def test_overrides_are_merged_last_nested_or_dotted() -> None:
    document = {"model": MODEL, "budget": {"max_trials": 5, "max_seconds": 9}, "num_csx": 2}
    changes = {"model.seq_length": 48, "budget": {"max_trials": 7}, "num_devices": 4, "bta.enable": True}
    request = parse_request(document, overrides=changes)
    assert (request.shapes.seq_length, request.budget.max_trials, request.budget.max_seconds) == (48, 7, 9)
    assert (request.num_devices, request.bta.enable) == (4, True)
    assert document["num_csx"] == 2  # the caller's document is left as it was
    assert MODEL["seq_length"] == 32


def test_an_override_replaces_a_micro_batch_choice_whole() -> None:
    document = {"model": MODEL, "micro_batch_size": {"explore": {"min": 2, "max": 4}}}
    assert parse_request(document, overrides={"micro_batch_size": 8}).micro_batch_size == 8
    ranged = parse_request(document, overrides={"micro_batch_size": {"explore": {"max": 16}}}).micro_batch_size
    assert ranged == parse_request({"model": MODEL, "micro_batch_size": {"explore": {"max": 16}}}).micro_batch_size


def test_a_fault_in_an_override_is_located_where_the_override_is() -> None:
    ((location, _),) = refusal({"model_type": "llama", "target": "bexp"}, **{"model.num_query_groups": 5})
    assert location == ("model", "num_query_groups")


def test_variants_of_an_imported_model() -> None:
    request = parse_request(
        {"model_type": "llama", "target": "bexp"}, overrides={"model.num_query_groups": [1, 8, None]}
    )
    assert [model.query_groups for model in request.space.variants()] == [1, 8, 32]


@pytest.mark.parametrize(
    ("changes", "location", "part"),
    [
        ({"micro_batch_size": 0}, ("micro_batch_size",), "must be 'explore', 'auto'"),
        ({"micro_batch_size": 257}, ("micro_batch_size",), "from 1 to 256"),
        ({"micro_batch_size": "most"}, ("micro_batch_size",), "must be 'explore', 'auto'"),
        ({"micro_batch_size": []}, ("micro_batch_size",), "must be 'explore', 'auto'"),
        ({"micro_batch_size": True}, ("micro_batch_size",), "true or false"),
        ({"micro_batch_size": {"explore": {"min": 4, "max": 2}}}, ("micro_batch_size", "explore", "min"), "exceeds"),
        ({"micro_batch_size": {"explore": {"min": 0}}}, ("micro_batch_size", "explore", "min"), "greater than"),
        ({"micro_batch_size": {"explore": {"step": 2}}}, ("micro_batch_size", "explore", "step"), "not a known field"),
        ({"batch_size": 7, "num_devices": 2, "micro_batch_size": "auto"}, ("batch_size",), "multiple of"),
        ({"batch_size": 10, "bta": {"max_tile": 4}}, ("bta", "max_tile"), "must divide batch_size"),
        ({"batch_size": float("nan")}, ("batch_size",), "finite"),
        ({"batch_size": 10**10}, ("batch_size",), "less than or equal"),
        ({"num_devices": True}, ("num_devices",), "true or false"),
        ({"num_devices": 2, "num_csx": 3}, ("num_csx",), "contradicts"),
        ({"model": {**MODEL, "num_attention_heads": 5}}, ("model", "hidden_size"), "multiple of"),
        ({"model": {**MODEL, "num_query_groups": 3}}, ("model", "num_query_groups"), "must divide"),
        ({"model": {**MODEL, "num_query_groups": [1, 3]}}, ("num_query_groups",), "must divide"),
        ({"model": {**MODEL, "depth": 3}}, ("model", "depth"), "is not a known field"),
        ({"model": {**MODEL, "moe": {**MOE, "num_experts": 10**9}}}, ("model", "moe", "num_experts"), "1023"),
        ({"model": "gpt2"}, ("model",), "mapping"),
        ({"model": None}, ("model",), "mapping"),
        ({"parallelism": {"tensor": 2}}, ("parallelism", "tensor"), "does not divide num_devices (1)"),
        ({"expert_backends": ["loop"]}, ("expert_backends",), "without experts"),
        ({"what": 1}, ("what",), "is not a known field"),
        ({"seq_len": 8}, ("seq_len",), "(did you mean 'model.seq_length'?)"),
        ({"budget": {"max_second": 1}}, ("budget", "max_second"), "(did you mean 'max_seconds'?)"),
        ({"model": {**MODEL, "hiden_size": 3}}, ("model", "hiden_size"), "(did you mean 'hidden_size'?)"),
        ({"model": {"model_type": "lama"}, "target": "bexp"}, ("model", "model_type"), "(did you mean 'llama'?)"),
    ],
)  # fmt: skip
def test_each_fault_has_one_error_at_its_field(changes: dict[str, Any], location: tuple[str, ...], part: str) -> None:
    ((found, message),) = refusal({"model": MODEL, **changes})
    assert found == location
    assert part in message


@pytest.mark.parametrize("document", [{}, {"batch_size": 3}, {"modle": MODEL}])
def test_a_missing_model(document: dict[str, Any]) -> None:
    ((location, message),) = refusal(document)
    assert location == ("model",)
    assert "missing" in message


def test_notices_that_are_no_list_are_refused_also_where_a_model_is_translated() -> None:
    model = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_query_groups": []}
    with pytest.raises(FormatError):
        parse_request({"target": "bexp", "model": model, "notices": 9})


def test_a_document_that_is_no_mapping() -> None:
    assert refusal([MODEL]) == [((), "must be a mapping of field names to values")]


def test_parsed_bodies_are_held_to_the_rules_of_texts() -> None:
    assert refusal({"model": {**MODEL, "name": "a\0b"}}) == [(("model", "name"), "contains a NUL character")]
    nested: Any = 1
    for _ in range(200):
        nested = [nested]
    assert "nested deeper" in refusal({"model": MODEL, "recompute": nested})[0][1]


def test_a_full_request_survives_a_round_trip() -> None:
    request = parse_request(
        {"model": MODEL, "micro_batch_size": {"explore": {"min": 2, "max": 8}}, "recompute": ["none"]}
    )
    assert parse_request(request.model_dump(mode="json")) == request
