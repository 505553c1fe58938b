"""The answer of `bexp tune` as what to change in the command, what that is worth, and a run with it."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.api.cli.tuned_command import SIZE, STEPS, TunedCommand
from bexp.api.cli.yaml_lines import UnchangeableError
from bexp.client.explorations import Explorations
from bexp.explorer.answers.text import row
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.amounts import RateUnit, bytes_text, rate_text
from bexp.explorer.model.parts import EvaluationBatch, ProcessSpread, SampleLengths
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.recommendation import Recommendation, Role
from bexp.measure.device_names import parse_devices
from bexp.tune import link
from bexp.tune.environment import on_devices, with_hook
from bexp.tune.placeholders import APPLY, apply_lines, describe_choice, fill, stands_in, text_of

PLACEHOLDER, STEPS_PLACEHOLDER = "micro_batch_size", "grad_accum_steps"
LOOP = "loop"
"""The class of a training that is no Trainer's, whose size is not in TrainingArguments."""


@dataclass(frozen=True)
class Speed:
    """The speed and the peak of a candidate; the peak is None if it was not measured as a whole."""

    candidate: Candidate
    tokens_per_second: float
    peak_bytes: int | None
    tokens_per_sample: int

    def __str__(self) -> str:
        unit = RateUnit.TOKENS if self.tokens_per_sample > 1 else RateUnit.SAMPLES
        peak = f", peak memory {bytes_text(self.peak_bytes)}" if self.peak_bytes else ""
        return f"{self.candidate.describe()}: {rate_text(self.tokens_per_second, unit)}{peak}"


@dataclass(frozen=True)
class TuneAnswer:
    """The best candidate that keeps the command's batch, and its base.

    `steps` is None if the batch is not known or if no candidate divides it. `own` are the command's own values, as far
    as they are known, and `choice` are the other settings of the best candidate. A peak of more than `most_bytes` does
    not fit.
    """

    best: Speed
    base: Speed
    steps: int | None
    batch_size: int | None
    own: Mapping[str, Any]
    choice: Mapping[str, Any]
    class_name: str | None
    most_bytes: int
    counted_steps: int | None = None
    """The accumulation steps that trials of the best candidate have counted."""

    @classmethod
    def find(
        cls, stored: Explorations, job_id: str, tries: Mapping[str, list[Any]], batch_size: int | None
    ) -> TuneAnswer | None:
        """Return the answer of an exploration; None if there is none. `batch_size` is that of the option, if given."""
        job = stored.get(job_id)
        recommendation, parts = job.recommendation, None if job.report is None else job.report.parts
        if recommendation is None:
            return None
        length, own_size = (1, None) if parts is None else (parts.seq_length or 1, parts.micro_batch_size)
        batch = batch_size or (None if parts is None else parts.batch_size)
        own = {name: values[0] for name, values in tries.items()} | {SIZE: own_size}
        if own_size and batch and batch_size is None:
            own[STEPS] = batch // own_size
        peaks: dict[Candidate, int] = {}
        counted: dict[Candidate, int] = {}
        for trial in stored.trials(job_id):
            for component in trial.measurement.components:
                if component.grad_accum_steps is not None:
                    counted[trial.candidate] = component.grad_accum_steps
            peaks[trial.candidate] = max(peaks.get(trial.candidate, 0), trial.measured_peak_bytes or 0)
        candidate, rate, steps = _best(recommendation)
        base, base_rate = recommendation.base, recommendation.expected_tokens_per_second / recommendation.performance
        overhead = recommendation.required_bytes - recommendation.measured_peak_bytes
        choices = (dict(zip(tries, values, strict=True)) for values in itertools.product(*tries.values()))
        return cls(
            best=Speed(candidate, rate, peaks.get(candidate), length),
            base=Speed(base, base_rate, peaks.get(base), length),
            steps=steps,
            batch_size=batch,
            own=own,
            choice=next((each for each in choices if describe_choice(each) == candidate.settings), {}),
            class_name=None if parts is None else parts.class_name,
            most_bytes=recommendation.memory_limit_bytes - overhead,
            counted_steps=counted.get(candidate),
        )

    @property
    def size(self) -> int:
        """The micro-batch of a device."""
        return self.best.candidate.micro_batch_size

    @property
    def values(self) -> dict[str, Any]:
        """The sizes and settings by the names of TrainingArguments' fields."""
        return {SIZE: self.size, **({} if self.steps is None else {STEPS: self.steps}), **self.arguments}

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings in addition to the size that a command can express."""
        return {name: value for name, value in self.choice.items() if name != APPLY}

    def rows(self, command: TunedCommand) -> Iterator[str]:
        """Yield the changes to a command, and their worth."""
        named = {PLACEHOLDER: self.size, STEPS_PLACEHOLDER: self.steps, **self.choice}
        named = {name: value for name, value in named.items() if stands_in(name, command.arguments)}
        filled = [f"{{{name}}} = {text_of(value)}" for name, value in named.items() if value is not None]
        left = self._left(command)
        lines = [", ".join(filled)] if filled else []
        lines += command.changes(left, self.own, takes_flags=self.class_name != LOOP)
        applied = apply_lines(self.choice.get(APPLY, "none"), self.size)
        for number, line in enumerate(lines or ([] if applied else ["nothing to change"])):
            yield row("" if number else "for the command", line)
        for number, line in enumerate(applied):
            yield row("" if number else "before train()", line)
        if self.batch_size is None and self.counted_steps is not None:
            text = f"{self.size} x {self.counted_steps} in an optimizer step, as counted; --batch-size N keeps it at N"
            yield row("command's batch", text)
        if self.base.candidate != self.best.candidate:
            is_own = self.base.candidate.micro_batch_size == self.own[SIZE] and not self._has_size(command)
            yield row("before" if is_own else "base", str(self.base))
            yield row("after", str(self.best))

    def write(self, command: TunedCommand, path: Path) -> None:
        """Write the command's YAML with this answer.

        Raises CommandError if that cannot be done.
        """
        text = _changed(command, self.values)
        assert command.yaml is not None, "its text was changed"
        mode = command.yaml.stat().st_mode & 0o777  # what is a secret there is one in its copy
        with open(path, "x", newline="", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
        say(f"wrote {path}")

    def run(self, command: TunedCommand, device: str | None, written: Path | None) -> NoReturn:
        """Become the command, with this answer. `written` takes the place of its YAML.

        Raises CommandError if no size divides the batch, which would be another one.
        """
        if self.steps is None and self.batch_size is not None:
            reason = f"no size that was tried divides the batch of {self.batch_size}"
            raise CommandError(ExitCode.NO_ANSWER, f"the command is not started: {reason}")
        values = {PLACEHOLDER: self.size, STEPS_PLACEHOLDER: self.steps or 1, **self.choice}
        arguments = fill(command.with_flags(self._left(command), written), values)
        own = {name: value for name, value in self.choice.items() if not stands_in(name, command.arguments)}
        promise = {
            "tokens_per_second": self.best.tokens_per_second,
            "tokens_per_sample": self.best.tokens_per_sample,
            "has_size": self._has_size(command) or command.has_flag(SIZE),
            "has_braces": self._has_size(command),
        }
        environment = with_hook(os.environ) | {
            link.SIZE: str(self.size),
            **({} if self.steps is None else {link.STEPS: str(self.steps)}),
            link.CHOICE: json.dumps(own),
            link.PROMISE: json.dumps(promise),
        }
        if device is not None:
            environment = on_devices(environment, parse_devices(device))
        if self.class_name == LOOP and not promise["has_size"]:
            say("note: what the script computes from its own sizes, such as a number of steps, does not change")
        sys.stdout.flush()
        sys.stderr.flush()
        for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and what it becomes would as well
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.execvpe(arguments[0], arguments, environment)  # noqa: S606 - the command of the person who asks for it

    def _left(self, command: TunedCommand) -> dict[str, Any]:
        values = {name: value for name, value in self.values.items() if not stands_in(name, command.arguments)}
        return {n: v for n, v in values.items() if n not in {SIZE, STEPS}} if self._has_size(command) else values

    @staticmethod
    def _has_size(command: TunedCommand) -> bool:
        return stands_in(PLACEHOLDER, command.arguments)


def check_writable(command: TunedCommand, path: Path) -> None:
    """Raise CommandError, before anything is run, if the command's YAML cannot be written with other values there."""
    _changed(command, {SIZE: 1, STEPS: 1})
    if path.exists() or not path.parent.is_dir():
        why = "it exists" if path.exists() else f"there is no folder {path.parent}"
        raise CommandError(ExitCode.USAGE, f"--write {path}: {why}")


def _changed(command: TunedCommand, values: Mapping[str, Any]) -> str:
    try:
        return command.changed_yaml(values)
    except (OSError, UnchangeableError) as error:
        where = f"{command.yaml}: " if command.yaml is not None else ""
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandError(ExitCode.USAGE, f"--write: {where}{reason}") from error


def _best(best: Recommendation) -> tuple[Candidate, float, int | None]:
    """Return the candidate that keeps the batch, else the best, with its tokens/s and its accumulation steps."""
    other = best.alternative(Role.DIVIDING)
    if best.grad_accum_steps is None and other is not None:
        return other.candidate, other.tokens_per_second, other.grad_accum_steps
    return best.candidate, best.expected_tokens_per_second, best.grad_accum_steps


MOST_SIZES = 2
NOTICED = 1.05
"""A process counts as slower or fuller than the others beyond this factor."""


def describe_training(stored: Explorations, job_id: str, answer: Candidate, most_bytes: int) -> Iterator[str]:
    """Yield lines of the answer with this candidate; a peak above `most_bytes` does not fit."""
    report = stored.get(job_id).report
    parts = None if report is None else report.parts
    if parts is None:
        return
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
    if parts.gradients is not None and parts.gradients.agrees is False:
        yield row("gradients", parts.gradients.text)
    if parts.evaluation is not None:
        yield row("evaluation", describe_evaluation(parts.evaluation, most_bytes))
    if parts.processes is not None:
        yield row("processes", describe_processes(parts.processes))


def describe_worst(samples: SampleLengths | None, size: int) -> str:
    """Return whether the longest micro-batch of a size is known and ran, as text."""
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
    """Return the micro-batch of the longest samples that just fits, as a real number, at least the largest that ran.

    It follows from the peaks of the smallest and of the largest size that ran, unless a size that failed contradicts.
    """
    least, most = min(peaks, default=1), max(peaks, default=1)
    if least == most or peaks[least] >= peaks[most]:
        return float(most)
    fitted = most + (limit - peaks[most]) * (most - least) / (peaks[most] - peaks[least])
    return fitted if most <= fitted < min(failed, default=math.inf) else float(most)


def describe_larger(samples: SampleLengths, fitting: float, failed: set[int]) -> str:
    """Return how often sizes that do not fit meet a micro-batch that is too long; empty if that is not known."""
    if samples.tail is None:
        return ""
    shares = []
    for size in sorted(failed)[:MOST_SIZES]:
        share = share_longer(samples, size, samples.longest * fitting / size)
        often = f"1 in {1 / share:,.0f}" if share < 2 / 3 else "nearly all"
        shares.append(f"{size} has no memory for up to {often} micro-batches")
    return f"{', '.join(shares)}; each pass over the data has one" if shares else ""


def share_longer(samples: SampleLengths, size: int, tokens: float) -> float:
    """Return the share of micro-batches of `size`, in random order, whose longest sample exceeds `tokens`."""
    assert samples.tail is not None, "the caller has looked"
    power = float(np.interp(tokens, samples.tail, range(len(samples.tail))))
    share = 1.0 - (1.0 - 2.0**-power) ** size
    return share if tokens < samples.longest else 0.0


def describe_evaluation(batch: EvaluationBatch, most_bytes: int) -> str:
    """Return whether the largest batch of an evaluation fits `most_bytes`, and if not, why and what would."""
    shown = f"one batch of {batch.batch_size:,}" + (f" x {batch.length:,} tokens" if batch.length else "")
    if batch.failure is not None:
        return f"not measured: {shown} {batch.failure}"
    if batch.peak_bytes is not None and batch.peak_bytes <= most_bytes:
        return f"{shown}, the longest there is, has a peak of {bytes_text(batch.peak_bytes)}"
    of = f"of {bytes_text(most_bytes)}"
    if batch.peak_bytes is None:
        why = f"{shown} has no memory"
    else:
        why = f"does not fit: {shown} has a peak of {bytes_text(batch.peak_bytes)} {of}"
    if batch.kept_bytes:
        kept = f"the outputs of {batch.kept_rows:,} rows kept for compute_metrics"
        why += f", {bytes_text(batch.kept_bytes)} of it {kept}"
    ways = [f"eval_accumulation_steps {batch.fitting_steps}"] if batch.fitting_steps else []
    ways += ["preprocess_logits_for_metrics"] if batch.kept_bytes else []
    if batch.fitting_size is not None and batch.fitting_peak_bytes is not None:
        fits = f"per_device_eval_batch_size {batch.fitting_size} has {bytes_text(batch.fitting_peak_bytes)}"
        return f"{why}; {' with '.join([fits, *ways[-1:]])}"
    return f"{why}; {' or '.join(ways) or 'lower per_device_eval_batch_size'}"


def describe_processes(spread: ProcessSpread) -> str:
    """Return the slowest and the fullest process, as text; all processes wait for the slowest."""
    said = []
    if spread.slower > NOTICED:
        said.append(f"rank {spread.slowest} is the slowest, with {spread.slower:.2f}x the seconds of the fastest")
    if spread.fuller > NOTICED:
        said.append(f"rank {spread.fullest} is the fullest, with {spread.fuller:.2f}x the peak of the emptiest")
    return f"{spread.number}: {'; '.join(said) or 'none is slower or fuller than another by 5%'}"
