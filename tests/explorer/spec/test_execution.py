"""A choice of executions, kernels and attention back ends in a request."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bexp.explorer.spec.execution import Execution, Kernels
from bexp.explorer.spec.request import ExplorationRequest

CONFIG = {"hf_config": {"model_type": "llama"}, "hf_seq_length": 8}


REFERENCE = {
    "target": "bexp",
    "hf_config": None,
    "hf_seq_length": None,
    "model": {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1, "seq_length": 8}
    | {"vocab_size": 8},
}


def build(**fields: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate({**CONFIG, "target": "transformers", **fields})


def test_a_list_or_explore_is_a_choice() -> None:
    both = (Execution.EAGER, Execution.COMPILE)
    assert build(execution=["compile", "eager"]).space.execution_choices == both
    assert build(execution="explore").space.execution_choices == tuple(Execution)
    assert build(execution="compile").space.execution_choices == (None,)
    assert [build(execution=asked).space.compiles for asked in ("eager", "compile", "explore", ["eager"])] == [
        *(False, True, True, False)
    ]


def test_explore_leaves_out_what_the_request_cannot_have() -> None:
    both = (Execution.EAGER, Execution.COMPILE)
    for fields in ({"device_kind": "cpu"}, {"num_devices": 2}, {"num_csx": 2}, {"mode": "eval"}):
        assert build(execution="explore", **fields).space.executions == both
    assert build(execution="explore", **REFERENCE).space.executions == tuple(Execution)
    assert build(execution=["compile", "compile+graph"], **REFERENCE).space.always_compiles


def test_compiled_layers_alone_have_no_policies_by_operation() -> None:
    asked = {
        fields: build(execution=fields).space.recompute_policies for fields in ("compile", ("compile",), "explore")
    }
    assert asked["compile"] == asked[("compile",)]
    assert not any(policy.by_operation for policy in asked["compile"])
    assert any(policy.by_operation for policy in asked["explore"])


@pytest.mark.parametrize(
    "fields",
    [
        {"execution": []},
        {"execution": ["eager"], "executions": ["compile"]},
        {"execution": ["eager", "fast"]},
        {"execution": "graph", "mode": "eval"},
        {"execution": ["eager", "graph"], "num_devices": 2},
        {"execution": "compile+graph", "device_kind": "cpu"},
        {"execution": "graph", "target": "mine", "hf_config": None, "hf_seq_length": None},
        {"execution": ["eager", "graph"], "target": "mine", "hf_config": None, "hf_seq_length": None},
        {"kernels": ["liger"], "execution": "compile"},
        {"kernels": ["liger"], "execution": ["compile"]},
        {"execution": "compile", "executions": ["eager", "compile"]},
        {"execution": ["compile"], "recompute": ["none", "activations"]},
    ],
)
def test_a_wrong_choice_names_the_field(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="execution"):
        build(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"execution": "compile+graph", "device_kind": "cpu"}, r"'compile\+graph' needs a GPU; a CPU has 'eager'"),
        ({"execution": "graph", "num_devices": 2}, "needs num_devices 1, .*several devices have 'eager'"),
    ],
)
def test_a_refused_execution_names_those_that_can_be_had(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        build(**fields)


@pytest.mark.parametrize("fields", [{"kernels": []}, {"kernels": ["apex"]}, {"kernels": ["liger"], "target": "mine"}])
def test_wrong_kernels_name_the_field(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="kernels"):
        build(**fields)


def test_the_models_own_kernels_alone_are_no_choice() -> None:
    assert build(kernels=["library"]).space.kernel_choices == (None,)
    assert build(kernels=["liger"]).space.kernel_choices == (Kernels.LIGER,)
    assert build(kernels=["liger", "library"]).space.kernel_choices == (Kernels.LIBRARY, Kernels.LIGER)


@pytest.mark.parametrize("name", ["sdpa:flash", "sdpa:cudnn", "sdpa:efficient", "sdpa:math", "flash_attention_2"])
def test_an_attention_back_end_may_name_one_of_torchs_kernels(name: str) -> None:
    assert build(attention_backends=[name]).attention_backends == (name,)


@pytest.mark.parametrize("name", ["sdpa:", ":flash", "sdpa:flash:math", "sdpa flash", "sdpa:Flash"])
def test_an_attention_back_end_is_a_name_with_at_most_one_kernel(name: str) -> None:
    with pytest.raises(ValidationError, match="attention_backends"):
        build(attention_backends=[name])
