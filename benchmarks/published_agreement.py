"""Whether a trainer's runs keep what an answer promised for a published input."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

PEAK, SPEED = 0.03, 0.05
"""The shares by which a run may be off its promise."""

Row = dict[str, Any]


def promise_of(document: Row, format_of: str) -> Row:
    """Return what an answer, as `bexp best --json` prints it, promises for one device with the stated batch."""
    from bexp.explorer.model.parts import ModelParts  # noqa: PLC0415 - late: a machine may lack its packages
    from bexp.explorer.records.recommendation import Recommendation  # noqa: PLC0415 - likewise

    answer = Recommendation.model_validate(document["recommendation"])
    parts = ModelParts.model_validate(document["job"]["report"]["parts"])
    chosen = answer.for_batch
    return {
        "micro_batch_size": chosen.candidate.micro_batch_size,
        "grad_accum_steps": chosen.grad_accum_steps,
        "own_micro_batch_size": parts.micro_batch_size,
        "candidate": chosen.candidate.model_dump(mode="json"),
        "confidence": answer.confidence,
        "format": parts.dtype,
        "format_of": format_of,
        "parameter_bytes": parts.parameter_bytes,
        "trained_bytes": parts.trainable_bytes,
        "peak_bytes": chosen.expected_peak_bytes,
        "unit": answer.rate_unit,
        "rate": chosen.expected_tokens_per_second,
        "performance": answer.performance,
        "notes": [note.text for note in answer.notes],
        "class_name": parts.class_name,
    }


def agreement(promise: Row, rounds: Sequence[Row]) -> Row:
    """Return for each promise whether the observed runs keep it, and their figures as shares of those promised.

    The speed is that of all rounds in the mean. `rounds_differ` is how far the fastest is from the slowest, as a share
    of that. All else is that of the first.
    """
    observed, *_ = rounds
    formats = dict(observed["products"])
    if promise["format_of"] == "trained weights":
        formats = observed["trained_bytes"]
    peak = None if observed["peak_bytes"] is None else observed["peak_bytes"] / promise["peak_bytes"]
    speeds = [each[f"{promise['unit']}_per_second"] / promise["rate"] for each in rounds]
    speed = statistics.fmean(speeds)
    steps = promise["grad_accum_steps"] or 1
    of_widths = speed * statistics.fmean(rate_of_widths(promise, each) for each in rounds)
    return {
        "batch": observed["micro_steps_of_a_step"] == steps
        and observed["samples_of_a_step"] == steps * promise["micro_batch_size"],
        "format": max(formats, key=lambda name: formats[name], default=None) == promise["format"],
        "parameters": sum(observed["trained_bytes"].values()) == promise["trained_bytes"],
        "weights": sum(observed["parameter_bytes"].values()) == promise["parameter_bytes"],
        "peak": None if peak is None else abs(peak - 1) <= PEAK,
        "peak_of_promised": peak,
        "speed": abs(of_widths - 1) <= SPEED,
        "speed_of_promised": speed,
        "speed_of_promised_for_its_widths": of_widths,
        "rounds_differ": (max(speeds) - min(speeds)) / speed,
    }


def rate_of_widths(promise: Row, observed: Row) -> float:
    """Return how many times slower the first steps of a training are than the mean of its epoch, by their new widths.

    A promise is for an epoch, in which widths of rows come again. Most of those in a training's first steps are new.
    """
    if not promise.get("new_widths"):
        return 1.0
    each, share = (statistics.fmean(values) for values in zip(*promise["new_widths"], strict=True))
    met, is_new = set[str](), list[bool]()
    for step in observed["steps"]:
        shapes = {json.dumps(shape) for shape in step["shapes"]}
        is_new += [True] * len(shapes - met) + [False] * (step["micro_steps"] - len(shapes - met))
        met |= shapes
    timed = is_new[-sum(step["micro_steps"] for step in observed["steps"][-observed["timed_steps"] :]) :]
    amount = statistics.fmean(step[promise["unit"]] / step["micro_steps"] for step in observed["steps"])
    return float(1.0 + (statistics.fmean(timed) - share) * each * promise["rate"] / amount)
