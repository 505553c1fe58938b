"""Explorations with an answer, to be exported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.exports.export import export
from bexp.explorer.model.model import DType
from bexp.explorer.model.parts import LayerPart, ModelParts, Part
from bexp.explorer.model.target import OWN_ATTENTION
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.trainer_terms import formats_for
from tests.contracts.samples import make_recommendation, make_report
from tests.explorer.shapes import shapes

GIB = 1 << 30
CONFIG: dict[str, Any] = {
    "model_type": "olmoe",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_experts": 64,
    "vocab_size": 50304,
    "eos_token_id": [1, 2],
}
_PART = Part(num_parameters=1, parameter_bytes=2, trainable_bytes=2, flops_per_token=1, saved_bytes_per_token=1)
_LAYER = LayerPart(name="moe", has_experts=True, **_PART.model_dump())
PARTS = ModelParts(
    target="transformers",
    target_version="5.23.0",
    name="olmoe",
    class_name="OlmoeForCausalLM",
    dtype=DType.BFLOAT16,
    seq_length=4096,
    layers=("moe",) * 16,
    kinds=(_LAYER,),
    shell=_PART,
    output_bytes_per_token=4096,
    num_parameters=1,
    parameter_bytes=2,
    trainable_bytes=2,
)


def candidate(micro_batch_size: int = 8, **changes: Any) -> Candidate:
    """A candidate that the transformers library runs by itself, unless `changes` say otherwise."""
    values = {"attention_backend": "sdpa", "expert_backend": "grouped_mm", "num_query_groups": 1, **changes}
    return Candidate(micro_batch_size=micro_batch_size, **values)


def exploration(
    best: Candidate | None = None,
    *,
    trials: Sequence[Trial] = (),
    final: bool = True,
    known: dict[str, Any] | None = None,
    **changes: Any,
) -> ExportSource:
    """An exploration of OLMoE by target transformers, with the answer `best`; `changes` go to the request."""
    request = ExplorationRequest.model_validate(
        {"hf_config": CONFIG, "hf_seq_length": 4096, "batch_size": 512, "num_devices": 1, **changes}
    )
    found = best or candidate()
    steps = {"grad_accum_steps": accumulation_steps(request, found)}
    return ExportSource(
        id="job1",
        request=request,
        report=device_report(),
        recommendation=recommendation(found, **(steps | (known or {}))),
        trials=trials,
        final=final,
    )


def own_exploration(seq_length: int, settings: str | None = None, **changes: Any) -> ExportSource:
    """An exploration of a target that a person has written; `seq_length` is 1 if it states none.

    `settings` is the answer's choice among those of the target.
    """
    best = Candidate(micro_batch_size=4, attention_backend=OWN_ATTENTION, num_query_groups=1, settings=settings)
    found = exploration(best, hf_config=None, hf_seq_length=None, target="mine", batch_size=16, **changes)
    return with_parts(found, target="mine", target_version="1.0", seq_length=seq_length)


def with_parts(answer: ExportSource, **changes: Any) -> ExportSource:
    """The exploration of a model whose parts differ from the sample's in `changes`."""
    assert answer.report is not None
    parts = PARTS.model_copy(update=changes)
    return replace(answer, report=answer.report.model_copy(update={"parts": parts}))


def offered(answer: ExportSource) -> list[str]:
    """The formats that can hold an answer."""
    assert answer.recommendation is not None
    return formats_for(answer.recommendation, answer.request)


def header_of(name: str, answer: ExportSource) -> str:
    """The lines that an export says of itself."""
    return "\n".join(export(name, answer).header)


def device_report() -> DeviceReport:
    """The report of an H200 that measured OLMoE."""
    report = make_report("NVIDIA H200", "cuda")
    hardware = report.hardware.model_copy(update={"memory_bytes": 141 * GIB, "memory_limit_bytes": 139 * GIB})
    return report.model_copy(update={"hardware": hardware, "parts": PARTS, "default_attention": "sdpa"})


def accumulation_steps(request: ExplorationRequest, best: Candidate) -> int | None:
    """The micro-steps of a device in the stated batch; None if there is none, or if it is not divided."""
    if request.batch_size is None:
        return None
    together = best.micro_batch_size * request.num_devices // best.context_parallel_size
    return None if request.batch_size % together else request.batch_size // together


def recommendation(best: Candidate, **changes: Any) -> Recommendation:
    """An answer with 1000 tokens/s on 60 of 139 GiB."""
    update = {"candidate": best, "memory_limit_bytes": 139 * GIB, "required_bytes": 60 * GIB, **changes}
    return make_recommendation().model_copy(update=update)


OURS = candidate(
    attention_backend="sdpa:flash", expert_backend="bexp_fused", recompute=Recompute.ACTIVATIONS, loss="chunked"
)
"""A candidate with what no other framework has."""
SHAPES = shapes(10, 64, 64, heads=8, vocab=64, length=128)
LENGTHS = {512: 30, 3000: 10}
"""Numbers of texts by their tokens."""
SHARDED: dict[str, Any] = {"num_devices": 8, "training": {"sharding": "zero3"}}
