"""Examples for the OpenAPI document: one small exploration while it runs."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from bexp.api.problem_responses import MEDIA_TYPE
from bexp.api.refusals import Problem
from bexp.client.explorations import Links
from bexp.explorer.answers.answer import Explored, answer_text
from bexp.explorer.cost.step import MemoryParts
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.formats.document import load_document
from bexp.explorer.records.event import Event as LogEvent
from bexp.explorer.records.event import EventCode, EventDraft, recommendation_event, render_line
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.run_report import RunReport
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.trainer_terms import formats_for

JOB_ID = "9f1c2d3e4a5b46c7"
CREATED_AT = "2026-01-15T19:39:12Z"

REQUEST_YAML = """\
model:
  name: tiny-moe
  num_layers: 4
  hidden_size: 256
  num_attention_heads: 4
  num_query_groups: 2
  vocab_size: 4096
  seq_length: 128
  dtype: float32
  moe: {num_experts: 8, top_k: 2, expert_ffn_hidden_size: 512}
batch_size: 64
micro_batch_size: explore
budget: {max_seconds: 60}
labels: {team: search}
"""
REQUEST: dict[str, Any] = load_document(REQUEST_YAML)

_CANDIDATE = Candidate(micro_batch_size=2, attention_backend="flash", expert_backend="loop", num_query_groups=2)
_RECOMMENDATION = Recommendation(
    candidate=_CANDIDATE,
    base=_CANDIDATE.model_copy(update={"micro_batch_size": 1}),
    tokens_per_second=5120.0,
    performance=1.2,
    confidence=45,
    step_seconds=1.6,
    micro_step_seconds=0.0496,
    optimizer_seconds=0.0128,
    composed_tokens_per_second=5120.0,
    grad_accum_steps=32,
    predicted_peak_bytes=268_435_456,
    measured_peak_bytes=262_144_000,
    required_bytes=335_544_320,
    memory_limit_bytes=8_589_934_592,
    memory=MemoryParts(parameters=65_536_000, gradients=65_536_000, optimizer_states=131_072_000),
)
_SAID = answer_text(Explored(JOB_ID, None, is_over=False), _RECOMMENDATION, None)
_TEXT = None if _SAID is None else _SAID.model_dump(mode="json")
_LOG = tuple(
    LogEvent(seq=seq, at=at, **draft.model_dump())
    for seq, (at, draft) in enumerate(
        (
            (CREATED_AT, EventDraft(code=EventCode.QUEUED, message="Queued: tiny-moe, micro_batch_size explore")),
            ("2026-01-15T19:39:45Z", recommendation_event(_RECOMMENDATION)),
        ),
        start=1,
    )
)
_TRIAL = Trial(
    number=0,
    kind=TrialKind.COMPONENTS,
    measurement=Measurement(candidate=_CANDIDATE, outcome=Outcome.OUT_OF_MEMORY, reason="16.2 GiB over 8.0 GiB"),
    predicted_peak_bytes=17_394_617_549,
)

SUMMARY: dict[str, Any] = {
    "id": JOB_ID,
    "state": "running",
    "owner": "local",
    "priority": 0,
    "model": "tiny-moe",
    "labels": {"team": "search"},
    "device_name": "NVIDIA H100 80GB HBM3",
    "micro_batch_size": 2,
    "performance": _RECOMMENDATION.performance,
    "tokens_per_second": _RECOMMENDATION.tokens_per_second,
    "confidence": 45,
    "confidence_target": 95,
    "created_at": CREATED_AT,
    "started_at": "2026-01-15T19:39:13Z",
    "finished_at": None,
    "cancel_requested": False,
    "waiting_reason": None,
    "queue": None,
    "error": None,
    "answered_from": None,
    "links": Links.of(JOB_ID).model_dump(),
}
EXPLORATION: dict[str, Any] = {
    **SUMMARY,
    "request": ExplorationRequest.model_validate(REQUEST).model_dump(mode="json"),
    "attempt": 1,
    "last_seq": 2,
    "notes": "Before the change of the tokenizer.",
    "report": None,
    "space": None,
    "recommendation": _RECOMMENDATION.model_dump(mode="json"),
    "answer": None,
    "text": _TEXT,
    "export_formats": formats_for(_RECOMMENDATION),
    "own_formats": formats_for(_RECOMMENDATION),
}
QUEUED: dict[str, Any] = {
    **EXPLORATION,
    **dict.fromkeys(("device_name", "micro_batch_size", "performance", "tokens_per_second", "confidence")),
    **dict.fromkeys(("started_at", "notes", "recommendation", "text")),
    "state": "queued",
    "attempt": 0,
    "last_seq": 1,
    "export_formats": [],
    "own_formats": [],
}
CANCELLED: dict[str, Any] = {**EXPLORATION, "cancel_requested": True}
ANSWERED: dict[str, Any] = {
    **EXPLORATION,
    "state": "succeeded",
    "started_at": None,
    "finished_at": CREATED_AT,
    "attempt": 0,
    "last_seq": 4,
    "answered_from": {"exploration": "0a1b2c3d4e5f6071", "measured_at": "2026-01-14T08:02:55Z"},
}
RECOMMENDATION: dict[str, Any] = {
    "id": JOB_ID,
    "state": "running",
    "final": False,
    "target": "bexp",
    "target_version": None,
    "target_class": None,
    "allocator": "default",
    "recommendation": _RECOMMENDATION.model_dump(mode="json"),
    "answer": None,
    "text": _TEXT,
    "hardware": None,
    "request": None,
}
RUN_REPORT: dict[str, Any] = {
    "number": 1,
    "received_at": "2026-01-15T21:04:07Z",
    "report": RunReport(
        tokens_per_second=5010.0,
        peak_bytes=263_192_576,
        peak_reserved_bytes=301_989_888,
        steps=200,
        micro_batch_size=2,
        seconds=327.0,
        hardware="NVIDIA H100 80GB HBM3",
        versions={"torch": "2.11.0", "transformers": "5.17.0"},
        finished_at=datetime(2026, 1, 15, 21, 4, 5, tzinfo=UTC),
    ).model_dump(mode="json"),
}
RUN_REPORTS: dict[str, Any] = {"items": [RUN_REPORT], "next_cursor": None}
WORKERS: dict[str, Any] = {
    "items": [
        {
            "id": "gpu-host-4711-cuda:0-9f1c",
            "host": "gpu-host",
            "state": "measuring",
            "exploration": JOB_ID,
            "exploration_model": "tiny-moe",
            "exploration_started_at": "2026-01-15T19:39:13Z",
            "held_by": None,
            "devices": "cuda:0",
            "num_devices": 1,
            "gpus": [{"device": "cuda:0", "busy_share": 0.97, "temperature_celsius": 61}],
            "device_kind": "cuda",
            "device_name": "NVIDIA H100 80GB HBM3",
            "memory_bytes": 84_929_347_584,
            "fingerprint": "5d41402abc4b2a76",
            "versions": {"python": "3.12.3", "torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0"},
            "targets": {"bexp": "0.1.0", "transformers": "5.17.0"},
            "reserved": False,
            "started_at": "2026-01-15T08:00:00Z",
            "last_heartbeat_at": "2026-01-15T19:39:14Z",
            "lost_since": None,
        }
    ]
}
PAGE: dict[str, Any] = {"items": [SUMMARY], "next_cursor": None}
EVENTS: dict[str, Any] = {"items": [event.model_dump(mode="json") for event in _LOG], "next_cursor": None}
COMPARISON: dict[str, Any] = {
    "probability_b_faster": 0.98,
    "speedup": 1.12,
    "speedup_90_percent": [1.03, 1.22],
    "runs_needed": 0,
    "a": {"explorations": [JOB_ID], "model": "tiny-moe", "confidence": 45, "tokens_per_second": 5120.0, "num_runs": 2},
    "b": {"explorations": ["2f"], "model": "tiny-moe", "confidence": 88, "tokens_per_second": 5734.4, "num_runs": 2},
    "differences": ["execution: eager in A, compile in B"],
    "not_measured": [],
    "next_measurement": {"runs_of_each": 0, "seconds": 0.0, "advice": "none: which one is faster is known"},
}
TRIALS: dict[str, Any] = {"items": [_TRIAL.model_dump(mode="json")], "next_cursor": None, "end_cursor": "0"}
LOG = "".join(render_line(event) + "\n" for event in _LOG)
EVENT_STREAM = "".join(
    f"event: {event.code.name.lower()}\ndata: {event.model_dump_json()}\nid: {event.seq}\n\n" for event in _LOG
)
METRICS = '# HELP bexp_jobs Explorations by state.\n# TYPE bexp_jobs gauge\nbexp_jobs{state="running"} 1.0\n'

_DETAILS: dict[HTTPStatus, dict[str, Any]] = {
    HTTPStatus.UNAUTHORIZED: {"detail": "A bearer token is required."},
    HTTPStatus.FORBIDDEN: {"detail": "Pages of other origins may not use the service."},
    HTTPStatus.NOT_FOUND: {
        "type": "urn:bexp:problem:unknown-exploration",
        "detail": "There is no exploration with this id.",
    },
    HTTPStatus.NOT_ACCEPTABLE: {"detail": "This is offered as application/json."},
    HTTPStatus.CONFLICT: {
        "type": "urn:bexp:problem:no-recommendation",
        "detail": "The exploration has recommended nothing that a run could have followed.",
    },
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: {"detail": "A request may have 256 KiB at most."},
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: {"detail": "Send the request as application/json or application/yaml."},
    HTTPStatus.UNPROCESSABLE_ENTITY: {
        "type": "urn:bexp:problem:invalid-request",
        "detail": "The request is not one that can be explored.",
        "errors": [
            {
                "field": "bta.max_tile",
                "pointer": "#/bta/max_tile",
                "message": "bta.max_tile (5) must divide batch_size (64)",
            }
        ],
    },
    HTTPStatus.TOO_MANY_REQUESTS: {
        "type": "urn:bexp:problem:quota-exceeded",
        "detail": "Owner 'team-a' has as many queued explorations as its quota 'queued' allows (100).",
    },
    HTTPStatus.SERVICE_UNAVAILABLE: {
        "type": "urn:bexp:problem:database-unavailable",
        "detail": "The database does not answer.",
    },
}


NOT_FINISHED: dict[str, Any] = {
    "type": "urn:bexp:problem:not-finished",
    "detail": f"The exploration is running: end it first with POST /v1/explorations/{JOB_ID}/cancel.",
}


AUDIT: dict[str, Any] = {
    "items": [
        {
            "at": "2026-11-21T09:00:00Z",
            "action": "cancel",
            "subject": JOB_ID,
            "owner": "team-a",
            "token": "ci",
            "origin": "10.0.0.7",
        }
    ],
    "next_cursor": "41",
}
LIMITS: dict[str, Any] = {"max_queued": 100, "max_running": 4, "max_stored_bytes": 5_000_000_000}
QUOTA: dict[str, Any] = LIMITS | {"owner": "team-a", "inherited": False}
QUOTAS: dict[str, Any] = {"items": [QUOTA]}


def problems(instance: str, *statuses: HTTPStatus, **details: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for the problems that a route may answer with; `details` replace those of a status."""
    return {
        int(status): {
            "description": status.phrase,
            "content": {
                MEDIA_TYPE: {
                    "schema": {"$ref": "#/components/schemas/Problem"},
                    "example": Problem(
                        title=status.phrase, status=status, instance=instance, **(_DETAILS[status] | details)
                    ).model_dump(exclude_none=True),
                }
            },
        }
        for status in statuses
    }


def example(value: Any, media_type: str = "application/json", description: str = "Done") -> dict[str, Any]:
    """An OpenAPI response with an example."""
    return {"description": description, "content": {media_type: {"example": value}}}
