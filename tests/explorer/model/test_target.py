"""Targets: which requests they take, and what follows for a request without a ModelSpec."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bexp.explorer.dimensions.context_parallel import CONTEXT_PARALLEL
from bexp.explorer.dimensions.recompute import ON_DEVICE
from bexp.explorer.model.base import RuleError
from bexp.explorer.model.target import BEXP, TRANSFORMERS, name_local_target
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.request.test_request import MODEL

CONFIG: dict[str, Any] = {"model_type": "gemma2", "_name_or_path": "org/Gemma-2-2b", "num_hidden_layers": 2}
HUGGING_FACE: dict[str, Any] = {"hf_config": CONFIG, "hf_seq_length": 64}
LORA: dict[str, Any] = {"r": 8, "target_modules": ["q_proj"]}


def build(**fields: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate(fields)


def fields_at_fault(**fields: Any) -> tuple[tuple[str, ...], ...]:
    with pytest.raises(ValidationError) as caught:
        build(**fields)
    (detail,) = caught.value.errors()
    error = detail["ctx"]["error"]
    assert isinstance(error, RuleError)
    return tuple((*map(str, detail["loc"]), *field) for field in error.fields)


def test_the_target_follows_from_what_describes_the_model() -> None:
    assert build(model=MODEL).target_name == BEXP
    assert build(**HUGGING_FACE).target_name == TRANSFORMERS
    assert build(model=MODEL, target="mine").target_name == "mine"
    assert build(target="mine").target_name == "mine"


def test_a_request_without_a_model_spec_has_what_the_search_needs() -> None:
    request = build(**HUGGING_FACE, num_devices=4, context_parallel={"sizes": [1, 2]}, batch_size=64)
    assert request.space.variants() == ()
    assert (request.explored.name, request.seq_length) == ("Gemma-2-2b", 64)
    assert request.space.recompute_policies == ON_DEVICE
    assert {sharing.size for sharing in CONTEXT_PARALLEL.considered(request.space.place)} == {1, 2}
    assert request.devices.needed() == 2
    assert ExplorationRequest.model_validate_json(request.model_dump_json()) == request


def test_a_registered_target_may_have_no_sequences() -> None:
    request = build(target="mine")
    assert (request.explored.name, request.seq_length) == ("mine", 1)


@pytest.mark.parametrize(("file", "name"), [("My GPT.py", "my-gpt"), ("py.py", "py"), ("gpt.py.py", "gpt.py")])
def test_a_target_of_a_file_is_named_after_it(file: str, name: str) -> None:
    request = build(target=name_local_target(f"/home/me/{file}:Target"))
    assert (request.target, request.explored.name) == (f"local.{name}", name)


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({}, ("model",)),
        ({"target": "bexp"}, ("model",)),
        ({"target": "bexp", **HUGGING_FACE}, ("model",)),
        ({"target": "transformers", "model": MODEL}, ("target",)),
        ({"model": MODEL, **HUGGING_FACE}, ("hf_config",)),
        ({"hf_config": CONFIG}, ("hf_seq_length",)),
        ({"model": MODEL, "hf_seq_length": 8}, ("hf_seq_length",)),
        ({"model": MODEL, "lengths": {8: 1}}, ("lengths",)),
        ({"model": MODEL, "training": {"precision": "autocast"}}, ("training", "precision")),
        ({"model": MODEL, "training": {"precision": "master"}}, ("training", "precision")),
        ({"target": "mine", "training": {"precision": "master"}}, ("training", "precision")),
        ({**HUGGING_FACE, "training": {"precision": "master", "lora": LORA}}, ("training", "precision")),
        *(
            (
                {**HUGGING_FACE, "training": {"precision": "master", "optimizer": {field: other}}},
                ("training", "optimizer", field),
            )
            for field, other in (("master_dtype", None), ("grad_dtype", "float32"), ("state_dtype", "bfloat16"))
        ),
        ({"model": MODEL, "training": {"lora": {"r": 8, "target_modules": ["q_proj"]}}}, ("training", "lora")),
        ({**HUGGING_FACE, "num_query_groups": [1]}, ("num_query_groups",)),
        ({"hf_config": {"hidden_size": 8}, "hf_seq_length": 8}, ("hf_config", "model_type")),
        ({"hf_config": CONFIG | {"auto_map": {"A": "b"}}, "hf_seq_length": 8}, ("hf_config", "auto_map")),
        (
            {"hf_config": CONFIG | {"text_config": {"trust_remote_code": True}}, "hf_seq_length": 8},
            ("hf_config", "text_config", "trust_remote_code"),
        ),
    ],
)
def test_each_rule_of_targets_names_the_field_at_fault(fields: dict[str, Any], at_fault: tuple[str, ...]) -> None:
    assert fields_at_fault(**fields)[0] == at_fault


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"model": MODEL}, "training.optimizer.master_dtype"),
        ({"target": "mine"}, "what its code keeps"),
        ({**HUGGING_FACE, "training": {"lora": LORA}}, "adapters are in float32"),
    ],
)
def test_master_weights_are_refused_by_name_where_they_make_no_sense(fields: dict[str, Any], remedy: str) -> None:
    training = {**fields.pop("training", {}), "precision": "master"}
    with pytest.raises(ValidationError, match=f"precision 'master' .*{remedy}"):
        build(**fields, training=training)


def test_master_weights_beside_their_own_formats() -> None:
    formats = {"master_dtype": "float32", "grad_dtype": "bfloat16", "state_dtype": "float32"}
    training = build(**HUGGING_FACE, training={"precision": "master", "optimizer": formats}).training
    assert training.keeps_master_weights
    assert not build(**HUGGING_FACE).training.keeps_master_weights


@pytest.mark.parametrize("target", ["", "Mine", "-x", "../x", "a" * 65, "a:B"])
def test_a_target_with_an_odd_name_is_refused(target: str) -> None:
    with pytest.raises(ValidationError, match="target"):
        build(model=MODEL, target=target)


def test_a_config_has_a_cap_on_size_and_nesting() -> None:
    with pytest.raises(ValidationError, match="larger than 256 KiB"):
        build(hf_config=CONFIG | {"padding": "x" * (256 * 1024)}, hf_seq_length=8)
    nested: Any = 1
    for _ in range(20):
        nested = {"inner": nested}
    with pytest.raises(ValidationError, match="nested deeper than 16"):
        build(hf_config=CONFIG | {"deep": nested}, hf_seq_length=8)
