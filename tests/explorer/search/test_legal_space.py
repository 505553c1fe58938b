"""Which candidates a request admits on a device, why a space is empty, and what 1.00x may mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.model.model import Variant
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from bexp.explorer.search.legal_space import LegalSpace, base_candidates, enumerate_candidates, explored_models
from tests.explorer.cost import described, tiny
from tests.explorer.shapes import shapes
from tests.explorer.simulator import SimulatedDevice, report

MODEL = shapes(2, 64, heads=2, vocab=128, length=16, moe={"num_experts": 4, "top_k": 2, "expert_ffn_hidden_size": 64})


def device(*experts: BackendSupport) -> DeviceReport:
    return report().model_copy(update={"expert_backends": experts})


def explored(found: DeviceReport, **changes: Any) -> set[str | None]:
    request = ExplorationRequest.model_validate({"model": MODEL, "micro_batch_size": [1], **changes})
    return {c.expert_backend for c in enumerate_candidates(request, found, request.shapes).candidates}


LOOP = BackendSupport(name="loop", usable=True)
COMPARED = BackendSupport(name="hopper_grouped", usable=True, only_when_named=True)


def test_a_back_end_for_comparison_is_left_out_unless_it_is_named() -> None:
    found = device(LOOP, COMPARED)
    assert explored(found) == {"loop"}
    assert explored(found, expert_backends=["hopper_grouped"]) == {"hopper_grouped"}
    assert explored(found, expert_backends=["loop", "hopper_grouped"]) == {"loop", "hopper_grouped"}


DENSE = report(experts=False)


def space(req: ExplorationRequest, found: DeviceReport = DENSE) -> LegalSpace:
    return enumerate_candidates(req, found, tiny.model_of(req))


def bases(req: ExplorationRequest, found: DeviceReport = DENSE) -> tuple[Candidate, ...]:
    return base_candidates(req, found, tiny.model_of(req))


def test_a_summary_names_every_field_of_a_candidate_with_its_values() -> None:
    made: dict[str, tuple[Any, Any]] = {
        **{"micro_batch_size": (1, 2), "bta_tile": (None, 2), "recompute": ("partial_75", "layers_2")},
        **{
            "attention_backend": ("cudnn", "flash"),
            "expert_backend": ("fused", "loop"),
            "loss": ("chunked", "library"),
        },
        **{"context_parallel_size": (2, 4), "context_parallel_layout": ("contiguous", "zigzag")},
        **{"sharding": ("none", "zero3"), "execution": ("compile", "graph"), "kernels": ("library", "liger")},
        **{"num_query_groups": (4, 4), "capacity_factor": (None, None), "settings": (None, "tf32=true")},
    }
    assert made.keys() == Candidate.model_fields.keys(), "and so does this test"
    found = [Candidate.model_validate({name: pair[i] for name, pair in made.items()}) for i in (1, 0)]
    model = tiny.model_of(tiny.request())
    summary = json.loads(json.dumps(LegalSpace(model, tuple(found)).summarize()))
    assert summary.pop("num_candidates") == 2
    of_model = {name: value for name, value in model.variant._asdict().items() if value is not None}
    assert summary == {**{name: list(pair) for name, pair in made.items() if name not in Variant._fields}, **of_model}


def test_the_first_base_has_the_policy_that_is_asked_for() -> None:
    assert [bases(tiny.request(base_recompute=policy))[0].recompute for policy in (None, "full")] == ["none", "full"]
    only = tiny.request(base_recompute="full", recompute=["none"])
    assert (bases(only)[0].recompute, {c.recompute for c in space(only).candidates}) == ("full", {"none"})


@pytest.mark.parametrize("name", ["flash", "sdpa:flash", "flash_attention_2"])
def test_flash_attention_is_excluded_under_each_of_its_names(name: str) -> None:
    found = report().model_copy(update={"attention_backends": (yes(name), yes("math")), "default_attention": name})
    request = tiny.request(flash_attention=False)
    assert {c.attention_backend for c in space(request, found).candidates} == {"math"}
    assert {c.attention_backend for c in base_candidates(request, found, request.shapes)} == {"math"}
    assert {c.attention_backend for c in base_candidates(tiny.request(), found, request.shapes)} == {name}


def test_the_base_is_the_smallest_size_with_torchs_attention_then_with_more_recomputation() -> None:
    found = bases(tiny.request(micro_batch_size=[2, 4]))
    assert [c.recompute.value for c in found] == ["none", "selective", "full"]
    assert {(c.micro_batch_size, c.bta_tile, c.attention_backend) for c in found} == {(2, None, "cudnn")}
    (asked, *_) = bases(tiny.request(micro_batch_size=[2, 4], base_micro_batch_size=4))
    assert asked.micro_batch_size == 4
    assert [c.recompute.value for c in bases(tiny.request(mode="eval"))] == ["none"]


def no(name: str) -> BackendSupport:
    return BackendSupport(name=name, usable=False, reason=f"no {name}")


def yes(name: str) -> BackendSupport:
    return BackendSupport(name=name, usable=True)


OWN = {"hf_config": {"model_type": "llama"}, "hf_seq_length": 32, "batch_size": 8, "micro_batch_size": [1, 2]}
EXPERTS = {"model": MODEL, "micro_batch_size": [1]}
ALONE = described.parts(layers=("dense",), kinds=[described.parts().kinds[0]])


@pytest.mark.parametrize(
    ("asked", "changes", "message"),
    [
        (
            {**OWN, "losses": ["liger", "chunked"]},
            {"choices": {"loss": (no("chunked"), no("liger"))}},
            "no usable loss with transformers 5.17.0 (chunked: no chunked; liger: no liger)",
        ),
        (
            {**OWN, "executions": ["graph", "compile"]},
            {"choices": {"execution": (no("graph"), no("compile"), yes("eager"))}},
            "no usable execution with transformers 5.17.0 (graph: no graph; compile: no compile)",
        ),
        (
            {**OWN, "recompute": ["layers_9"]},
            {},
            "recompute 'layers_9': the model has 6 layers; the nearest policy is 'full'",
        ),
        (
            {**OWN, "expert_backends": ["eager"]},
            {"parts": ALONE},
            "expert_backends are given, and there are no experts with transformers 5.17.0",
        ),
        (
            {
                **EXPERTS,
                "num_devices": 4,
                "batch_size": 8,
                "micro_batch_size": 4,
                "context_parallel": {"sizes": [1, 4]},
            },
            {},
            "no micro_batch_size divides what 1 devices get of batch_size (8), and this worker's profiler has no more "
            "that could share sequences",
        ),
        (
            {**EXPERTS, "execution": "graph", "expert_backends": ["loop"]},
            {},
            "execution 'graph' with expert back end 'loop', which waits for the device to count tokens",
        ),
        (
            {**EXPERTS, "attention_backends": ["math"]},
            {"attention_backends": ()},
            "unknown attention back end 'math'; on this device there is none",
        ),
        (
            {**EXPERTS, "flash_attention": False},
            {"attention_backends": (yes("flash"),)},
            "no attention back end is left on this device once flash is excluded",
        ),
    ],
)
def test_an_exploration_of_an_empty_space_ends_with_the_reason(
    asked: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    found = (described.device() if "hf_config" in asked else report()).model_copy(update=changes)
    request = ExplorationRequest.model_validate(asked)
    (step,) = explore(request, found, SimulatedDevice(request))
    assert step.answer is not None
    assert step.answer.variants[0].reason == message
    assert [event.message for event in step.events] == [f"No recommendation: {message}"]


def test_what_a_device_cannot_do_is_left_out_beside_what_it_can() -> None:
    asked = {"losses": ["library", "chunked"], "kernels": ["library", "liger"], "recompute": ["none", "full"]}
    req = ExplorationRequest.model_validate({**OWN, **asked, "executions": ["eager", "compile"]})
    usable = {"execution": (yes("eager"), yes("compile")), "loss": (yes("library"), no("chunked"))}
    choices = {**usable, "kernels": (yes("library"), yes("liger"))}
    found = described.device().model_copy(update={"choices": choices})
    candidates = enumerate_candidates(req, found, explored_models(req, found)[0]).candidates
    assert {c.loss for c in candidates} == {"library"}
    code = {(str(c.execution), str(c.kernels)) for c in candidates}
    assert code == {("eager", "library"), ("eager", "liger"), ("compile", "library")}, (
        "compiled code has kernels of its own"
    )
    assert len(candidates) == 2 * 2 * 3 * 4 * 3, "sizes, policies, code, attention and experts"


def test_torch_s_own_loss_is_explored_only_if_it_is_named() -> None:
    losses = (yes("library"), yes("chunked"), yes("torch"))
    found = described.device().model_copy(update={"choices": {"loss": losses}})
    for asked, expected in ((None, {"library", "chunked"}), (["torch", "library"], {"torch", "library"})):
        req = ExplorationRequest.model_validate({**OWN, "losses": asked})
        candidates = enumerate_candidates(req, found, explored_models(req, found)[0]).candidates
        assert {c.loss for c in candidates} == expected
