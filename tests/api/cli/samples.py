"""Values that the command line's tests share."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from bexp.explorer.cost.step import MemoryParts
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.event import Event, EventCode
from bexp.explorer.records.measurement import Outcome, WholeModelMeasurement
from bexp.explorer.records.recommendation import (
    Alternative,
    Answer,
    Note,
    NoteCode,
    Recommendation,
    Role,
    VariantAnswer,
    WholeModelCheck,
)
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.alternatives import with_alternatives

GIB = 1 << 30

TINY: dict[str, Any] = {
    "model": {
        "name": "tiny",
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "seq_length": 32,
        "dtype": "float32",
        "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_hidden_size": 64},
    },
    "batch_size": 24,
    "micro_batch_size": [1, 2, 4],
    "budget": {"max_seconds": 10, "max_trials": 8, "confidence_target": 60},
}
REQUEST = ExplorationRequest.model_validate(TINY)
BASE = Candidate(micro_batch_size=1, attention_backend="math", expert_backend="loop", num_query_groups=4)
BEST = Candidate(
    micro_batch_size=4, bta_tile=2, attention_backend="flash", expert_backend="grouped_mm", num_query_groups=4
)
MEMORY = MemoryParts(parameters=GIB, gradients=GIB, optimizer_states=2 * GIB, activations=GIB // 2, transient=GIB // 4)
CHECK = WholeModelCheck(
    measurement=WholeModelMeasurement(
        micro_step_seconds=0.011,
        optimizer_seconds=0.02,
        standard_error_seconds=1e-4,
        peak_bytes=5 * GIB,
        reserved_bytes=6 * GIB,
        repeats=3,
    ),
    tokens_per_second=11_500.0,
    step_seconds=0.084,
    step_error=-0.043,
    peak_error=0.021,
)


def alternative(role: Role, of: Candidate, ratio: float, **changes: Any) -> Alternative:
    """A candidate that the recommended one below is so many times as fast as."""
    figures = {
        "tokens_per_second": 11_500.0 / ratio,
        "composed_tokens_per_second": 12_000.0 / ratio,
        "grad_accum_steps": 24 // of.micro_batch_size,
        "measured_peak_bytes": MEMORY.total,
        "required_bytes": 6 * GIB,
    }
    return Alternative.model_validate({"role": role, "candidate": of, "ratio": ratio, **figures, **changes})


RECOMMENDATION = Recommendation(
    candidate=BEST,
    base=BASE,
    tokens_per_second=12_345.6,
    performance=1.234,
    confidence=87,
    step_seconds=0.08,
    micro_step_seconds=0.01,
    optimizer_seconds=0.02,
    composed_tokens_per_second=12_000.0,
    grad_accum_steps=6,
    predicted_peak_bytes=5 * GIB,
    measured_peak_bytes=MEMORY.total,
    required_bytes=6 * GIB,
    memory_limit_bytes=8 * GIB,
    memory=MEMORY,
    whole_model=CHECK,
    alternatives=(
        alternative(Role.DIVIDING, BEST, 1.0, confidence=90, whole_model=CHECK),
        alternative(Role.FASTEST, BEST, 1.0, whole_model=CHECK),
        alternative(Role.WITHIN_1_PERCENT, BEST, 1.0, whole_model=CHECK),
        alternative(Role.WITHIN_3_PERCENT, BASE, 11_500 / 11_250, measured_peak_bytes=2 * GIB),
        alternative(Role.LARGEST_WITHOUT_RECOMPUTE, BASE, 1.12),
        alternative(Role.LARGEST_MICRO_BATCH, BEST, 1.23),
        alternative(Role.STOCK, BASE, 1.37, predicted=True),
        alternative(
            Role.RUNNER_UP,
            BASE,
            1.045,
            outcome=Outcome.OK,
            whole_model=CHECK.model_copy(update={"tokens_per_second": 11_004.8}),
        ),
    ),
    notes=(Note(code=NoteCode.COMMUNICATION, text="communication is not in the time"),),
)
SMALLER = alternative(
    Role.DIVIDING,
    BASE,
    11_500 / 10_900,
    grad_accum_steps=25,
    confidence=71,
    predicted=True,
    measured_peak_bytes=3 * GIB,
    required_bytes=4 * GIB,
)
"""What divides a batch that the recommended candidate does not divide."""
UNDIVIDED = with_alternatives(RECOMMENDATION, SMALLER, grad_accum_steps=None, nearest_batch_sizes=(20, 28))
ANSWER = Answer(
    variants=(VariantAnswer(num_query_groups=4, num_parameters=123_456, recommendation=RECOMMENDATION),),
    timings={"queue": 0.25, "timed": 3.5, "total": 4.0},
)
START = datetime(2026, 1, 2, 19, 39, 45, tzinfo=UTC)


def event(seq: int, code: EventCode, message: str = "something", **data: Any) -> Event:
    """An event `seq` seconds after the start."""
    return Event(seq=seq, at=START + timedelta(seconds=seq), code=code, message=message, data=data)


EVENTS = (
    event(1, EventCode.QUEUED, "queued"),
    event(2, EventCode.STARTED, "started"),
    event(3, EventCode.TRIAL, "trial 1", candidate=BASE.model_dump(mode="json"), tokens_per_second=10_000.0),
    event(
        4,
        EventCode.RECOMMENDATION,
        "Current recommended micro_batch_size: 4, estimated performance: 1.23x base, confidence score: 87 (out of 100)",
        recommendation=RECOMMENDATION.model_dump(mode="json"),
    ),
    event(5, EventCode.SUCCEEDED, "done"),
)


def job_document(state: str = "succeeded", **changes: Any) -> dict[str, Any]:
    """What the service answers for one exploration."""
    return {
        "id": "job1",
        "state": state,
        "model": "tiny",
        "micro_batch_size": 4,
        "confidence": 87,
        "created_at": START.isoformat(),
        "request": REQUEST.model_dump(mode="json"),
        **changes,
    }


def result_document(state: str = "succeeded", **changes: Any) -> dict[str, Any]:
    """What the service answers for a recommendation."""
    return {
        "id": "job1",
        "state": state,
        "final": state in {"succeeded", "failed", "cancelled"},
        "recommendation": RECOMMENDATION.model_dump(mode="json"),
        "answer": ANSWER.model_dump(mode="json"),
        **changes,
    }


def sse(*events: Event) -> bytes:
    """Events as they go over the wire."""
    text = "".join(f"id: {e.seq}\nevent: {e.code.name.lower()}\ndata: {e.model_dump_json()}\n\n" for e in events)
    return f": hello\n\n{text}".encode()
