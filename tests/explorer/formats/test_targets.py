"""A Hugging Face config.json for targets that take it as it came, and keys that change nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from bexp.explorer.formats.document import FormatError, load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.target import TRANSFORMERS
from tests.explorer.formats.refusals import refusal
from tests.explorer.shapes import shapes

GEMMA: dict[str, Any] = {
    "model_type": "gemma2",
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "an_invention": 3,
}


def test_a_config_is_kept_as_it_came() -> None:
    request = parse_request({**GEMMA, "target": "transformers", "batch_size": 16})
    assert request.hf_config == GEMMA
    assert request.model is None
    assert (request.target, request.hf_seq_length, request.batch_size) == ("transformers", 4096, 16)


def test_a_nested_config_and_an_overridden_target() -> None:
    document = {"model": {**GEMMA, "seq_length": 1024, "name": "mine"}}
    request = parse_request(document, overrides={"target": TRANSFORMERS})
    assert (request.seq_length, request.explored.name) == (1024, "mine")
    longer = parse_request(document, overrides={"target": TRANSFORMERS, "model.seq_length": 2048})
    assert longer.seq_length == 2048
    assert longer.hf_config == {**GEMMA, "_name_or_path": "mine"}


def test_a_model_of_shapes_without_a_name_is_called_by_them() -> None:
    dense = shapes(2, 64, 128, heads=4, vocab=9, length=8)
    experts = {"moe": {"num_experts": 4, "top_k": 2, "expert_ffn_hidden_size": 64}}
    assert parse_request({"model": dense}).explored.name == "dense-2x64"
    assert parse_request({"model": dense | experts}).explored.name == "moe-2x64"
    assert parse_request({"model": dense}, name="mine").explored.name == "mine"
    assert parse_request({"model": dense | {"name": "other"}}, name="mine").explored.name == "other"
    assert parse_request({"model_type": "llama"}, name="mine").explored.name == "llama", "the class has a name"


def test_the_longest_sequence_of_a_short_model_is_not_exceeded() -> None:
    short = parse_request({"model_type": "x", "text_config": {"max_position_embeddings": 512}, "target": TRANSFORMERS})
    assert short.seq_length == 512
    assert parse_request({"hf_config": {"model_type": "x", "n_positions": 256}}).seq_length == 256
    with pytest.raises(FormatError, match=r"did you mean 'hf_seq_length'"):
        parse_request({"hf_config": GEMMA, "seq_len": 256})


def test_a_parsed_request_is_parsed_again_as_it_is() -> None:
    for document in ({**GEMMA, "target": "transformers"}, {"target": "mine"}, {"model_type": "llama", "use_x": False}):
        request = parse_request(document)
        assert parse_request(request.model_dump(mode="json")) == request


@pytest.mark.parametrize(
    ("document", "location", "part"),
    [
        ({"hf_config": {**GEMMA, "a": {"trust_remote_code": 1}}}, ("hf_config", "a", "trust_remote_code"), "never run"),
        ({"model": {**GEMMA, "trust_remote_code": True}}, ("model", "trust_remote_code"), "never run"),
        ({"model": {**GEMMA, "model_type": 3}}, ("model", "model_type"), "kind of model"),
        ({**GEMMA, "seq_length": 0}, ("seq_length",), "greater than"),
        ({**GEMMA, "num_query_groups": [1]}, ("num_query_groups",), "model section"),
        ({"model": None}, ("model",), "mapping"),
    ],
)
def test_faults_are_located_in_the_document(document: Any, location: tuple[str, ...], part: str) -> None:
    assert part in refusal({**document, "target": "transformers"})[location]


@pytest.mark.parametrize("place", [lambda config: config, lambda config: {"hf_config": config}])
def test_the_code_that_a_published_config_names_is_left_out_and_noted(place: Callable[[Any], Any]) -> None:
    request = parse_request(place({**GEMMA, "auto_map": {"AutoConfig": "configuration_gemma.Config"}}))
    assert request.hf_config == GEMMA
    assert any("auto_map of config.json left out: the library's own class" in notice for notice in request.notices)


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config (gptq) is left out"),
        ({"architectures": ["Gemma2ForSequenceClassification"]}, "has another head and loss"),
        ({"torch_dtype": "float32"}, "dtype float32 of config.json is not used"),
        ({"text_config": {"output_router_logits": True}}, "whole models are run with it"),
    ],
)
def test_what_a_config_says_and_is_not_measured_is_noted_once(said: dict[str, Any], part: str) -> None:
    request = parse_request({**GEMMA, "seq_length": 64, **said})
    assert [part in notice for notice in request.notices] == [True]
    assert parse_request(request.model_dump(mode="json")) == request
    assert parse_request({"hf_config": {**GEMMA, **said}, "hf_seq_length": 64, "target": "mine"}).notices == ()


def test_the_head_of_a_language_model_is_not_noted() -> None:
    assert parse_request({**GEMMA, "seq_length": 64, "architectures": ["Gemma2ForCausalLM"]}).notices == ()


@pytest.mark.parametrize("place", [lambda config: config, lambda config: {"model": config}])
def test_a_time_step_without_a_limit_is_left_out(place: Callable[[Any], Any]) -> None:
    mamba = {"model_type": "mamba2", "time_step_limit": [0.0, float("inf")]}
    assert parse_request(load_document(json.dumps(place(mamba)))).hf_config == {"model_type": "mamba2"}
    with pytest.raises(FormatError, match="finite"):
        load_document(json.dumps(place({**mamba, "time_step_max": float("inf")})))


def test_a_misspelt_field_beside_a_config_is_noted() -> None:
    assert parse_request({**GEMMA, "seq_length": 256, "bach_size": 4}).notices == (
        "bach_size is read as a key of config.json (did you mean 'batch_size'?)",
    )
    assert parse_request({**GEMMA, "seq_length": 256, "text_config": {}, "attention_bias": True}).notices == ()


@pytest.mark.parametrize("target", ["transformers", "bexp"])
def test_a_length_that_nobody_states_is_assumed_and_noted_where_the_model_allows_another(target: str) -> None:
    config = {"model_type": "llama", "max_position_embeddings": 40960}
    request = parse_request(config, overrides={"target": target})
    assert request.seq_length == 4096
    assert request.notices == (
        "a sequence is assumed to have 4,096 tokens, although config.json allows 40,960: --seq-length sets it",
    )
    for stated in ({"model.seq_length": 512}, {"hf_seq_length": 512})[: 1 if target == "bexp" else 2]:
        request = parse_request(config, overrides={"target": target, **stated})
        assert (request.seq_length, request.notices) == (512, ())
    shorter = parse_request({**config, "max_position_embeddings": 2048}, overrides={"target": target})
    assert (shorter.seq_length, shorter.notices) == (2048, ())


def test_only_the_length_of_a_config_can_be_overridden() -> None:
    errors = refusal(GEMMA, **{"target": "transformers", "model.num_layers": 2})
    assert "cannot be overridden" in errors["model", "num_layers"]


def test_a_notice_stays_short() -> None:
    (notice,) = parse_request(
        {"target": "bexp", "model_type": "llama", **{f"{'k' * 200}{i}": None for i in range(900)}}
    ).notices
    assert len(notice) < 1000
    assert "888 more" in notice


@pytest.mark.parametrize("value", [1, None])
def test_thousands_of_unknown_keys_take_little_time(value: Any) -> None:
    unknown = {f"key_{i}": value for i in range(8000)}
    dense = shapes(2, 64, heads=4, vocab=9, length=8)
    for document in ({"target": "bexp", "model_type": "llama", **unknown}, {"model": dense | unknown}):
        seconds = []
        for _ in range(3):  # another program on the core makes one run slower, and no run faster
            start = time.process_time()
            try:
                parse_request(document)
            except FormatError as error:
                assert len(error.errors) <= 50
            seconds.append(time.process_time() - start)
        assert min(seconds) < 0.25
