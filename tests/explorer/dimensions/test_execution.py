"""A choice of executions, kernels and attention back ends in a request."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bexp.explorer.dimensions.attention import ATTENTION_OF
from bexp.explorer.dimensions.execution import EXECUTION, Execution
from bexp.explorer.dimensions.experts import EXPERTS_OF
from bexp.explorer.dimensions.kernels import KERNELS, Kernels
from bexp.explorer.model.target import BEXP
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.choices import choices_of

CONFIG = {"hf_config": {"model_type": "llama"}, "hf_seq_length": 8}


REFERENCE: dict[str, Any] = {
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
    assert choices_of(build(execution=["compile", "eager"]).space, EXECUTION) == both
    assert choices_of(build(execution="explore").space, EXECUTION) == tuple(Execution)
    assert choices_of(build(execution="compile").space, EXECUTION) == (None,)
    assert [build(execution=asked).space.compiles for asked in ("eager", "compile", "explore", ["eager"])] == [
        *(False, True, True, False)
    ]


def test_explore_leaves_out_what_the_request_cannot_have() -> None:
    both = (Execution.EAGER, Execution.COMPILE)
    for fields in ({"device_kind": "cpu"}, {"num_devices": 2}, {"num_csx": 2}, {"mode": "eval"}):
        assert build(execution="explore", **fields).space.executions == both
    assert build(execution="explore", **REFERENCE).space.executions == tuple(Execution)
    always = build(execution=["compile", "compile+graph"], **REFERENCE)
    assert EXECUTION.always_compiles(always.space.place)


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
    assert choices_of(build(kernels=["library"]).space, KERNELS) == (None,)
    assert choices_of(build(kernels=["liger"]).space, KERNELS) == (Kernels.LIGER,)
    assert choices_of(build(kernels=["liger", "library"]).space, KERNELS) == (Kernels.LIBRARY, Kernels.LIGER)


def test_a_choice_of_flash_alone_is_undone_by_its_exclusion() -> None:
    with pytest.raises(ValidationError, match="allows only flash"):
        build(attention_backends=["sdpa:flash", "flash_attention_2"], flash_attention=False)


MOE = {"num_experts": 2, "top_k": 1, "expert_ffn_hidden_size": 8}
EXPERTS: dict[str, Any] = {**REFERENCE, "model": {**REFERENCE["model"], "moe": MOE}}
OF_BEXP = (
    "there are block_sparse, bmm, cublas_grouped, deepgemm, fused, grouped_mm, hopper_grouped, liger, loop, sonicmoe"
)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention_backends": ["sdpa", "flsh"]}, "target 'transformers' has no attention back end 'flsh'"),
        ({"attention_backends": ["sdpa:flahs"]}, "(did you mean 'sdpa:flash'?); there are eager, flash_attention_2,"),
        ({"attention_backends": ["Sdpa"]}, "(did you mean 'sdpa'?)"),
        ({"attention_backends": ["flash"]}, "target 'transformers' has no attention back end 'flash'"),
        ({"expert_backends": ["fused"]}, "no expert back end 'fused'; there are batched_mm, bexp_block_sparse,"),
        ({**REFERENCE, "attention_backends": ["bcsr"]}, "'bcsr'; there are cudnn, efficient, flash, math"),
        ({**REFERENCE, "attention_backends": ["sdpa"]}, "target 'bexp' has no attention back end 'sdpa'"),
        ({**EXPERTS, "expert_backends": ["grouped_m"]}, f"(did you mean 'grouped_mm'?); {OF_BEXP}"),
        ({**EXPERTS, "expert_backends": ["bcsr"]}, f"no expert back end 'bcsr'; {OF_BEXP}"),
        ({**EXPERTS, "expert_backends": ["grouped mm"]}, "'grouped mm' (did you mean 'grouped_mm'?)"),
        ({"target": "mine", "attention_backends": ["sdpa"]}, "'mine' has no attention back end 'sdpa'; there are own"),
        ({"target": "mine", "expert_backends": ["fused"]}, "no expert back end 'fused'; its code chooses by itself"),
    ],
)
def test_an_unknown_back_end_is_refused_with_those_of_the_target(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        build(**fields)
    (detail,) = caught.value.errors()
    assert said in detail["msg"]
    field = next(name for name in fields if name.endswith("_backends"))
    assert detail["ctx"]["error"].fields == ((field,), ("target",))


def test_each_back_end_of_a_target_may_be_named() -> None:
    for target, names in ATTENTION_OF.items():
        own = REFERENCE if target == BEXP else {}
        for name in names:
            assert build(**own, attention_backends=[name]).attention_backends == (name,)
    for target, names in EXPERTS_OF.items():
        own = EXPERTS if target == BEXP else {}
        for name in names:
            assert build(**own, expert_backends=[name]).expert_backends == (name,)
    assert build(target="mine", attention_backends=["own"]).attention_backends == ("own",)
