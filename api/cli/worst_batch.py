"""What a training command may meet: its longest micro-batch, one that is too long, its evaluation, its processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from bexp.client.explorations import Explorations
from bexp.explorer.answers.text import row
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.amounts import bytes_text
from bexp.explorer.model.parts import EvaluationBatch, ModelParts, ProcessSpread, SampleLengths
from bexp.explorer.records.measurement import Outcome

MOST_SIZES = 2
NOTICED = 1.05
"""A process is slower or fuller than the others if it is so by more than this."""


def describe_training(stored: Explorations, job_id: str, answer: Candidate, most_bytes: int) -> Iterator[str]:
    """Yield lines of the answer with this candidate; a peak above `most_bytes` does not fit."""
    described = (stored.get(job_id).report or {}).get("parts")
    if described is None:
        return
    parts = ModelParts.model_validate(described)
    yield row("worst micro-batch", describe_worst(parts.samples, answer.micro_batch_size))
    peaks, failed = dict[int, int](), set[int]()
    for trial in stored.trials(job_id):
        its = trial.candidate.micro_batch_size
        if trial.candidate.settings != answer.settings:
            continue
        if trial.measurement.outcome is Outcome.OUT_OF_MEMORY:
            failed.add(its)
        elif trial.measured_peak_bytes:
            peaks[its] = max(peaks.get(its, 0), trial.measured_peak_bytes)
    if parts.samples is not None:
        failed = {size for size in failed if size > max(peaks, default=0)}  # others ran at another time
        larger = describe_larger(parts.samples, fitting_size(peaks, failed, most_bytes), failed)
        if larger:
            yield row("larger sizes", larger)
    if parts.evaluation is not None:
        yield row("evaluation", describe_evaluation(parts.evaluation))
    if parts.processes is not None:
        yield row("processes", describe_processes(parts.processes))


def describe_worst(samples: SampleLengths | None, size: int) -> str:
    """Whether the longest micro-batch of a size is known, and ran."""
    if samples is None:
        return "not known: the lengths or the order of the samples cannot be read"
    ran = f"{size * samples.rows:,} x {samples.longest:,} tokens ran first"
    if samples.num_read < samples.number:
        chance = (samples.number - samples.num_read) / samples.number
        return (
            f"{ran}: the longest of {samples.num_read:,} samples that were read, of {samples.number:,}. One of the "
            f"others is longer with a chance of {chance:.0%}, if they are in no order"
        )
    return f"{ran}: no micro-batch of this data is longer"


def fitting_size(peaks: Mapping[int, int], failed: set[int], limit: int) -> float:
    """The micro-batch of the longest samples that just fits, as a real number; it is at least the largest that ran.

    It follows from the peaks of the smallest and of the largest size that ran, if those that failed do not contradict.
    """
    least, most = min(peaks, default=1), max(peaks, default=1)
    if least == most or peaks[least] >= peaks[most]:
        return float(most)
    fitted = most + (limit - peaks[most]) * (most - least) / (peaks[most] - peaks[least])
    return fitted if most <= fitted < min(failed, default=math.inf) else float(most)


def describe_larger(samples: SampleLengths, fitting: float, failed: set[int]) -> str:
    """How often sizes that do not fit meet a micro-batch that is too long; nothing if that is not known."""
    if samples.tail is None:
        return ""
    told = []
    for size in sorted(failed)[:MOST_SIZES]:
        share = share_longer(samples, size, samples.longest * fitting / size)
        often = f"1 in {1 / share:,.0f}" if share < 2 / 3 else "nearly all"
        told.append(f"{size} has no memory for up to {often} micro-batches")
    return f"{', '.join(told)}; each pass over the data has one" if told else ""


def share_longer(samples: SampleLengths, size: int, tokens: float) -> float:
    """The share of micro-batches of a size, in a random order, whose longest sample has more tokens than these."""
    assert samples.tail is not None, "the caller has looked"
    power = float(np.interp(tokens, samples.tail, range(len(samples.tail))))
    share = 1.0 - (1.0 - 2.0**-power) ** size
    return share if tokens < samples.longest else 0.0


def describe_evaluation(batch: EvaluationBatch) -> str:
    """Whether the largest batch of an evaluation fits, and what it needs."""
    shown = f"one batch of {batch.batch_size:,}" + (f" x {batch.length:,} tokens" if batch.length else "")
    if batch.peak_bytes is None:
        return f"{shown} has no memory: lower per_device_eval_batch_size"
    return f"{shown}, the longest there is, has a peak of {bytes_text(batch.peak_bytes)}"


def describe_processes(spread: ProcessSpread) -> str:
    """Which process is slower than the others, and which is fuller; all of them wait for the slowest."""
    said = []
    if spread.slower > NOTICED:
        said.append(f"rank {spread.slowest} is the slowest, with {spread.slower:.2f}x the seconds of the fastest")
    if spread.fuller > NOTICED:
        said.append(f"rank {spread.fullest} is the fullest, with {spread.fuller:.2f}x the peak of the emptiest")
    return f"{spread.number}: {'; '.join(said) or 'none is slower or fuller than another by 5%'}"
