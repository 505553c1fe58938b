"""Values that the command line's tests share."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from bexp.client.explorations import FINAL_STATES, Links
from bexp.explorer.answers.answer import Explored, answer_text
from bexp.explorer.answers.lines import render
from bexp.explorer.answers.text import WIDTH
from bexp.explorer.cost.step import MemoryParts
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.device_report import DeviceReport
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


def told(
    found: Answer | Recommendation,
    request: ExplorationRequest | None = REQUEST,
    report: DeviceReport | None = None,
    *,
    width: int = WIDTH,
    brief: bool = False,
) -> str:
    """An answer, or the best of one that ended early, in lines."""
    answer = found if isinstance(found, Answer) else None
    best = found.recommendation if isinstance(found, Answer) else found
    text = answer_text(Explored("a1b2", request, report), best, answer)
    assert text is not None
    return render(text, width, brief=brief)


def said_of(
    found: Answer | Recommendation, request: ExplorationRequest | None = REQUEST, *, brief: bool = False
) -> str:
    """What is said of an answer, without its line breaks."""
    return " ".join(told(found, request, brief=brief).split())


def job_document(state: str = "succeeded", **changes: Any) -> dict[str, Any]:
    """What the service answers for one exploration; it has a recommendation unless it is queued."""
    document: dict[str, Any] = {
        **dict.fromkeys(("device_name", "started_at", "finished_at", "waiting_reason", "error", "answered_from")),
        **dict.fromkeys(("report", "space", "performance", "tokens_per_second")),
        "id": "job1",
        "state": state,
        "owner": "local",
        "priority": 0,
        "model": "tiny",
        "labels": {},
        "micro_batch_size": 4,
        "confidence": 87,
        "confidence_target": 60,
        "created_at": START.isoformat(),
        "cancel_requested": False,
        "attempt": 1,
        "last_seq": 5,
        "request": REQUEST.model_dump(mode="json"),
        **_answered(state, **changes),
        "export_formats": [],
        "own_formats": [],
        "notes": None,
        **changes,
    }
    return {**document, "links": Links.of(document["id"]).model_dump()}


def result_document(state: str = "succeeded", **changes: Any) -> dict[str, Any]:
    """What the service answers for a recommendation."""
    return {
        **dict.fromkeys(("target", "target_version", "target_class", "allocator", "hardware", "request")),
        "id": "job1",
        "state": state,
        "final": state in FINAL_STATES,
        **_answered(state, **changes),
        **changes,
    }


def _answered(state: str, **changes: Any) -> dict[str, Any]:
    """The recommendation, the answer, and what is said of both."""
    best: Any
    answer: Any
    request: Any
    best, answer, request = (
        None if found is None else of.model_validate(found)
        for of, found in (
            (Recommendation, changes.get("recommendation", None if state == "queued" else RECOMMENDATION)),
            (Answer, changes.get("answer", ANSWER if state == "succeeded" else None)),
            (ExplorationRequest, changes.get("request", REQUEST)),
        )
    )
    said = answer_text(Explored("job1", request, is_over=state in FINAL_STATES), best, answer)
    parts = {"recommendation": best, "answer": answer, "text": said}
    return {name: None if part is None else part.model_dump(mode="json") for name, part in parts.items()}


def sse(*events: Event) -> bytes:
    """Events as they go over the wire."""
    text = "".join(f"id: {e.seq}\nevent: {e.code.name.lower()}\ndata: {e.model_dump_json()}\n\n" for e in events)
    return f": hello\n\n{text}".encode()
