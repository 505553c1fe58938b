"""A callback for transformers' Trainer that compares a run with the recommendation."""

from __future__ import annotations

import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback as _Callback

from bexp.explorer.records.run_report import RunReport
from bexp.trainer.argument_differences import (
    argument_differences,
    length_difference,
    recomputes_layers,
    size_difference,
)
from bexp.trainer.model_setup import Report, applied_to, device_name, inner_model, versions
from bexp.trainer.recommended_setup import RecommendedSetup, Source
from bexp.trainer.trained_weights import differences_of_training
from bexp.transformers.graph import GraphedForward, graphed
from bexp.transformers.recompute import is_checkpointing

_LOGGER = logging.getLogger(__name__)
_WARM_UP_STEPS = 3
_TIMEOUT_SECONDS = 5.0
_SLOWER, _LARGER = 0.9, 1.05
"""A run that reaches less than this share of the speed, or more than this share of the peak, is worth a warning."""


class TrainerCallback(_Callback):
    """A comparison of tokens/s and peak memory with the recommendation, logged when training ends.

    When training begins, one line warns of each difference from the measurement: size and length of a micro-batch,
    number formats, adapters, recomputation, optimizer, packing. `comparison()` repeats them before the figures, with
    the length and the padding of the micro-batches that the model got.

    The log level is a warning if the run is slower by more than 10%, or needs more memory by more than 5%. `report` and
    `comparison()` have the figures afterwards.

    Every micro-batch counts `seq_length` tokens per sequence (default: the recommendation's), padding included. If
    batches are shorter than that, let the Trainer count: `include_num_input_tokens_seen="all"`. Where texts of unequal
    length were measured, padding does not count, and a sequence has their mean length. `"non_padding"` is then more
    exact, because a few steps differ from the mean.

    The first three steps are left out, because kernels are built in them. So are evaluations and checkpoints with their
    memory: torch's counters of peak memory are reset after them.

    If `service` (a URL) is set, the report is posted to `POST /v1/explorations/{id}/run-reports`. A service that does
    not answer costs at most five seconds, and the failure is logged. Only the first process reports, with the figures
    of its own device.
    """

    def __init__(
        self,
        recommendation: Source | RecommendedSetup,
        *,
        seq_length: int | None = None,
        service: str | None = None,
        token: str | None = None,
        exploration_id: str | None = None,
    ) -> None:
        self.recommendation = RecommendedSetup.read(recommendation)
        self.report: RunReport | None = None
        self._seq_length = seq_length or self.recommendation.seq_length
        self._service = service.rstrip("/") if service else None
        self._token = token
        self._exploration_id = exploration_id or self.recommendation.exploration_id
        self._run = _RunCounts()
        self._seen = SeenBatches()
        self._known: tuple[str, ...] = ()
        self._max_length: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Start counting from zero."""
        done = applied_to(model) if model is not None else None
        self._seen.stop()
        self._seen = SeenBatches()
        if model is not None and not getattr(args, "torch_compile", False):  # a hook would be compiled, too
            self._seen.watch(model)
        self._known = tuple(run_differences(self.recommendation, args, model, done))
        self._max_length = getattr(args, "max_length", None)  # TRL cuts texts to it
        if getattr(state, "is_world_process_zero", True):
            for difference in self._differences(_micro_batch_size(args, state)):
                _LOGGER.warning("not as measured: %s", difference)
        self._run = _RunCounts(
            applied=done is not None and done.recommendation.settings == self.recommendation.settings,
            graphed=None if model is None else graphed(inner_model(model)),
        )
        self.report = None
        _reset_peak()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave out the time and the memory of an evaluation or a checkpoint since the last step."""
        if self._run.interrupted:
            self._run.resume()

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a micro-batch that is not the last of its step."""
        self._run.micro_batches += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a step and its last micro-batch."""
        ends = control is not None and control.should_training_stop
        run = self._run
        run.micro_batches += 1
        run.steps += 1
        if run.steps == _WARM_UP_STEPS:
            run.begin(state)
        elif ends or _is_followed(control) or getattr(state, "global_step", 0) >= getattr(state, "max_steps", 0):
            _wait()  # the step counts in full, and what follows does not
        run.last_end = time.monotonic()
        if _is_followed(control):
            run.interrupt()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note that an evaluation or a checkpoint follows, if the Trainer has them at the end of an epoch."""
        if _is_followed(control) and not self._run.interrupted:
            _wait()
            self._run.last_end = time.monotonic()
            self._run.interrupt()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note that an evaluation ran since the last step, whoever asked for it."""
        self._run.interrupted = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note that a checkpoint was written since the last step, whoever asked for it."""
        self._run.interrupted = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log what the run reached, and post it if there is a service."""
        self._seen.stop()
        run = self._run
        if run.begun is None or run.steps <= _WARM_UP_STEPS:
            _LOGGER.info("the run was too short to compare with the recommendation")
            return
        micro_batch_size = _micro_batch_size(args, state)
        tokens = run.tokens_seen(state) / max(1, int(getattr(args, "world_size", 1)))
        mean = self.recommendation.tokens_per_sequence
        if mean is not None and getattr(args, "include_num_input_tokens_seen", None) != "non_padding":
            tokens = 0.0  # it counts padding as well, which the recommendation leaves out
        if not tokens and (mean or self._seq_length):
            tokens = (run.micro_batches - run.micro_batches_before) * micro_batch_size * (mean or self._seq_length or 0)
        if not tokens:
            _LOGGER.info("the run cannot be compared with the recommendation: give seq_length")
            return
        run.note_peak()
        seconds = max(1e-9, run.last_end - run.begun - run.paused)
        self.report = RunReport(
            tokens_per_second=tokens / seconds,
            peak_bytes=run.peak_bytes,
            peak_reserved_bytes=run.peak_reserved_bytes,
            steps=run.steps - _WARM_UP_STEPS,
            micro_batch_size=micro_batch_size,
            seconds=seconds,
            hardware=device_name(),
            versions=versions(),
            applied=run.applied
            and (run.graphed is None or run.graphed.loss.always_replays)
            and not self._differences(micro_batch_size),
            finished_at=datetime.now(UTC),
        )
        if getattr(state, "is_world_process_zero", True):
            _LOGGER.log(logging.WARNING if self._misses(self.report) else logging.INFO, "%s", self.comparison())
            self._post(self.report)

    def _misses(self, reached: RunReport) -> bool:
        promised = self.recommendation
        slower = promised.tokens_per_second and reached.tokens_per_second < _SLOWER * promised.tokens_per_second
        larger = promised.peak_bytes and reached.peak_bytes and reached.peak_bytes > _LARGER * promised.peak_bytes
        return bool(slower or larger)

    def _differences(self, micro_batch_size: int) -> list[str]:
        """Return what differs from what was measured; a length that was seen takes the place of the longest allowed."""
        promised, seen = self.recommendation, self._seen
        return [
            *size_difference(promised, micro_batch_size),
            *length_difference(promised, seen.longest or self._max_length),
            *seen.padding_difference(promised),
            *self._known,
        ]

    def comparison(self) -> str:
        """Return one line: what was not as measured, then what was reached of the promise."""
        if self.report is None:
            return f"nothing was measured: the first {_WARM_UP_STEPS} steps warm up"
        reached, promised = self.report, self.recommendation
        differences = self._differences(reached.micro_batch_size)
        text = f"not as measured ({'; '.join(differences)}): " if differences else ""
        text += f"{reached.tokens_per_second:,.0f} tokens/s per device"
        if promised.tokens_per_second:
            share = reached.tokens_per_second / promised.tokens_per_second
            text += f" of {promised.tokens_per_second:,.0f} promised ({share:.0%})"
        if reached.peak_bytes is not None:
            text += f", peak {reached.peak_bytes / 2**30:.1f} GiB"
            if promised.peak_bytes:
                text += f" of {promised.peak_bytes / 2**30:.1f} promised"
        return text

    def _post(self, report: RunReport) -> None:
        if self._service is None or self._exploration_id is None:
            return
        url = f"{self._service}/v1/explorations/{self._exploration_id}/run-reports"
        if not url.startswith(("http://", "https://")):
            _LOGGER.warning("the run report was not sent: %s is not the URL of a service", self._service)
            return
        sender = threading.Thread(target=_send, args=(url, self._token, report.model_dump_json()), daemon=True)
        sender.start()
        sender.join(_TIMEOUT_SECONDS)
        if sender.is_alive():
            _LOGGER.warning("the run report was not sent: %s does not answer", self._service)


def _send(url: str, token: str | None, report: str) -> None:
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, report.encode(), headers, method="POST")  # noqa: S310 - checked
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310 - checked above
            response.read()
    except (OSError, ValueError, urllib.error.URLError) as error:
        _LOGGER.warning("the run report was not sent: %s", error)


@dataclass
class _RunCounts:
    """Counts of a run."""

    applied: bool = False
    """`bexp.apply` has set the model up with the settings of the recommendation."""
    steps: int = 0
    """Optimizer steps, the first ones included."""
    micro_batches: int = 0
    """Micro-batches of this process, the first ones included."""
    micro_batches_before: int = 0
    """Those before the report counts."""
    tokens_before: int = 0
    """Tokens by the Trainer's count before the report counts."""
    begun: float | None = None
    """When the report began to count; None before."""
    last_end: float = 0.0
    """When the last step ended."""
    paused: float = 0.0
    """Seconds of evaluations and checkpoints."""
    interrupted: bool = False
    """An evaluation or a checkpoint follows or has run since the last step."""
    peak_bytes: int | None = None
    """Of training alone."""
    peak_reserved_bytes: int | None = None
    """Of training alone."""
    graphed: GraphedForward | None = None
    """The forward that replays micro-steps as CUDA graphs, if the model has one."""
    _peak_is_noted: bool = False

    def begin(self, state: Any) -> None:
        """Begin to count for the report, after the first steps."""
        _wait()
        self.begun = time.monotonic()
        self.micro_batches_before = self.micro_batches
        self.tokens_before = int(getattr(state, "num_input_tokens_seen", 0))

    def tokens_seen(self, state: Any) -> int:
        """Return the tokens of all processes since `begin`, if the Trainer counts them; else 0."""
        return int(getattr(state, "num_input_tokens_seen", 0)) - self.tokens_before

    def interrupt(self) -> None:
        """Keep the peaks, because no training follows."""
        self.note_peak()
        self._peak_is_noted = True
        self.interrupted = True

    def resume(self) -> None:
        """Go on with training, and leave out what happened since the last step."""
        if self.begun is not None:
            self.paused += time.monotonic() - self.last_end
        self.interrupted = False
        if self._peak_is_noted:
            self._peak_is_noted = False
            _reset_peak()

    def note_peak(self) -> None:
        """Take the device's counters into account, unless they contain more than training."""
        if torch.cuda.is_available() and not self._peak_is_noted:
            graphs = 0 if self.graphed is None else self.graphed.loss.held_bytes
            self.peak_bytes = max(self.peak_bytes or 0, torch.cuda.max_memory_allocated() + graphs)
            self.peak_reserved_bytes = max(self.peak_reserved_bytes or 0, torch.cuda.max_memory_reserved())


def _is_followed(control: Any) -> bool:
    """Return whether an evaluation or a checkpoint comes next."""
    return control is not None and bool(control.should_evaluate or control.should_save)


def _micro_batch_size(args: Any, state: Any) -> int:
    """Return the sequences of a device's micro-batch; the Trainer may have found another size than it was given."""
    size = getattr(state, "train_batch_size", None)
    if not size:
        return int(args.per_device_train_batch_size)
    return int(size) // max(1, int(getattr(args, "n_gpu", 1)))


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def run_differences(setup: RecommendedSetup, args: Any, model: nn.Module | None, done: Report | None) -> Iterator[str]:
    """Yield a line for each difference, except in the size and the length of micro-batches, which data decide.

    `done` is what `bexp.apply` did to `model`. Without a model, its weights and its own checkpointing are not compared.
    """
    yield from argument_differences(setup, args)
    if recomputes_layers(args):
        yield from _checkpointing_difference(setup, "full")
    elif done is not None:
        yield from _checkpointing_difference(setup, done.recommendation.settings.recompute)
    elif model is not None:
        yield from _checkpointing_difference(setup, "full" if is_checkpointing(model) else "none")
    if model is not None:
        inner = inner_model(model)
        yield from differences_of_training(inner, setup)


def _checkpointing_difference(setup: RecommendedSetup, run_policy: str) -> Iterator[str]:
    """Yield a line if a run recomputes its layers by another policy than was measured."""
    measured = setup.settings.recompute
    if setup.own_code or run_policy == measured:
        return
    if run_policy == "full":
        yield (
            f"gradient checkpointing recomputes every layer, in place of the recommended recomputation '{measured}': "
            "switch it off in TrainingArguments"
        )
    else:
        yield f"recomputation '{run_policy}', not '{measured}'"


_FLATTENED = ("position_ids", "cu_seq_lens_q")
"""Arguments of a forward pass that separate documents in one row, whose width says nothing of their length."""


class SeenBatches:
    """Notes of a model's micro-batches in training, by their shapes; the first one's mask is read as well.

    `longest` is the largest number of tokens in a sequence, 0 before the first micro-batch. `padded` says whether the
    first micro-batch was padded. It is None if that is not known, as of one sequence, which padding could not change.
    """

    def __init__(self) -> None:
        self.longest = 0
        self.padded: bool | None = None
        self._hook: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> None:
        """Note the micro-batches of `model` from now on."""
        self._hook = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def stop(self) -> None:
        """Note nothing more."""
        if self._hook is not None:
            self._hook.remove()

    def padding_difference(self, setup: RecommendedSetup) -> Iterator[str]:
        """Yield a line if these micro-batches are padded where the measured ones were not, or the reverse."""
        if self.padded is None or setup.batching is None:
            return
        if self.padded != (setup.batching in ("padded", "grouped")):
            seen, measured = ("padded", "whole") if self.padded else ("whole", "padded")
            yield f"{seen} sequences, not {measured} ones"

    def _note(self, model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        tokens = given.get("input_ids", args[0] if args else None)
        if (
            not model.training
            or not isinstance(tokens, Tensor)
            or any(given.get(name) is not None for name in _FLATTENED)
        ):
            return
        if not self.longest:
            mask = given.get("attention_mask")
            has_gaps = isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())
            self.padded = has_gaps or (None if tokens.numel() == tokens.shape[-1] else False)
        self.longest = max(self.longest, tokens.shape[-1])
