"""A small table of a simulated device."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.measurement import ComponentFigures, Outcome
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import PrunedSpace
from bexp.workers.replay.recording import ComponentRow, Recording, RecordingHeader
from tests.simulated_tables import h200_report, simulate

MODEL: dict[str, Any] = {
    "name": "small",
    "num_layers": 4,
    "hidden_size": 1024,
    "ffn_hidden_size": 4096,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "vocab_size": 32000,
    "seq_length": 2048,
}


def request(**changes: Any) -> ExplorationRequest:
    """Some dozens of candidates."""
    small: dict[str, Any] = {
        "micro_batch_size": [1, 2, 4, 8, 16],
        "attention_backends": ["cudnn", "flash"],
        "recompute": ["none", "full"],
        "memory_limit_gib": 24,
        "batch_size": 64,
    }
    return ExplorationRequest.model_validate({"model": MODEL, **small, **changes})


def recording(seed: int = 0, whole_model_share: float = 0.0, **changes: Any) -> Recording:
    asked = request(**changes)
    return simulate("small", asked, h200_report(asked.shapes), seed, whole_model_share=whole_model_share)


def empty(**changes: Any) -> Recording:
    asked = request(**changes)
    header = RecordingHeader(
        name="small",
        request=asked,
        report=h200_report(asked.shapes),
        recorded_at=datetime(2026, 1, 1, tzinfo=UTC),
        process_start_seconds=5.0,
        noise="none",
    )
    return Recording(header)


def table_of(recorded: Recording) -> Composition:
    table = pruned_space_of(recorded).table
    assert table is not None
    return table


def pruned_space_of(recorded: Recording) -> PrunedSpace:
    return recorded.prune(recorded.header.request, recorded.header.request.shapes)


def figures(seconds: float = 0.01, *, host: float = 0.001, error: float = 1e-5) -> ComponentFigures:
    return ComponentFigures(
        device_seconds=seconds,
        host_seconds=host,
        forward_device_seconds=seconds / 3,
        standard_error_seconds=error,
        repeats=8,
        saved_bytes=1000,
        forward_peak_bytes=2000,
        backward_peak_bytes=3000,
    )


def row(component: Component, run: int = 0, seconds: float = 0.01, **changes: Any) -> ComponentRow:
    given = {"component": component, "run": run, "figures": figures(seconds), **changes}
    if given.get("outcome", Outcome.OK) is not Outcome.OK:
        given["figures"] = None
    return ComponentRow.model_validate(given)


def plan(
    model: ExploredModel, candidate: Candidate, components: tuple[Component, ...] = (), number: int = 0
) -> TrialTask:
    return TrialTask(
        number=number,
        kind=TrialKind.COMPONENTS if components else TrialKind.WHOLE_MODEL,
        model=model,
        candidate=candidate,
        components=components,
        timeout_seconds=60,
    )
