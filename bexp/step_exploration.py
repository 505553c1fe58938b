"""Finds the best micro-batch size for any training step, by measuring it in the training process itself.

Sizes are measured in ascending order. Each starts from the same state, whatever the earlier ones did. Afterwards
the gradients and the random state are as they were before.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from bexp.step_outcomes import Failure, Outcome, agree, attempt, release, slowest

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
TOLERANCE = 0.01
"""A size counts as good if its throughput is below the best by at most this share."""
_DRAWS = 4096
_WARM_UPS = 2
_UNKNOWN_SPREAD = 0.1
_LEAST_SPREAD = 0.001


@dataclass(frozen=True)
class SizeResult:
    """One micro-batch size. `seconds` holds the time of forward and backward of one micro-batch, for each repeat."""

    micro_batch_size: int
    outcome: str
    reason: str | None = None
    seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None

    @property
    def mean_seconds(self) -> float:
        """The mean over the repeats."""
        return sum(self.seconds) / len(self.seconds)


@dataclass(frozen=True)
class StepRecommendation:
    """The best size, and what is known of all that were tried.

    `confidence` is the probability, rounded down to 0..99, that the throughput of the size is within 1% of the best of
    all requested sizes, measurement errors included. Fields are null if nothing fits.
    """

    micro_batch_size: int | None
    grad_accum_steps: int | None
    sequences_per_second: float | None
    confidence: int | None
    optimizer_seconds: float
    results: tuple[SizeResult, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, which `bexp.training_arguments` reads."""
        return {**asdict(self), "candidate": {"micro_batch_size": self.micro_batch_size}}


def explore(
    *,
    step: Callable[[Any], Any],
    batch: Callable[[int], Any],
    sizes: Iterable[int] = SIZES,
    parameters: nn.Module | Iterable[nn.Parameter] = (),
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    effective_batch_size: int | None = None,
    no_sync: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    repeats: int = 5,
    deadline_seconds: float = 60.0,
    max_seconds: float = 300.0,
) -> StepRecommendation:
    """Measure a step at each size and recommend the best one.

    `batch(m)` makes a micro-batch of m sequences. `step(batch)` runs forward and backward and may return the loss.
    `parameters` are the trained parameters; their gradients are saved and restored. `optimizer(parameters)` makes an
    optimizer like the one used in training. It takes steps of size zero here, and its state is discarded.
    `effective_batch_size` is the number of sequences in a whole step over all processes. Only sizes that divide a
    process's share of it are tried, and the optimizer's time is spread over the micro-batches.

    If a step runs out of memory, fails, returns a loss that is not finite, or takes longer than `deadline_seconds`,
    that is the outcome of its size. No larger size is tried after one that runs out of memory. Nothing new is started
    after `max_seconds`.

    If there are several processes, all of them must call this with the same arguments. They get the same answer,
    because the outcome of one counts for all. Each size first runs within `no_sync()` (DDP's `model.no_sync`). If only
    one process runs out of memory, this happens before the others wait for its gradients.

    Raises ValueError if no size is left to try.
    """
    asked = _sizes(sizes, effective_batch_size)
    trained = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    device = _device(trained)
    with _left_alone(trained, device):
        held, optimizer_seconds, notes = _optimizer_state(trained, optimizer, device, deadline_seconds)
        results: list[SizeResult] = []
        begun = time.monotonic()
        for size in asked:
            if agree(_late(begun, max_seconds), device) is not None:
                notes.append(f"sizes from {size} on were not tried: the {max_seconds:g} s were used up")
                break
            results.append(_measure(size, step, batch, no_sync, trained, device, repeats, deadline_seconds))
            if results[-1].outcome == Outcome.OUT_OF_MEMORY.name.lower():
                break
        del held
    return _recommend(results, asked, optimizer_seconds, effective_batch_size, notes)


def _measure(
    size: int,
    step: Callable[[Any], Any],
    batch: Callable[[int], Any],
    no_sync: Callable[[], AbstractContextManager[Any]],
    trained: Sequence[nn.Parameter],
    device: torch.device,
    repeats: int,
    deadline_seconds: float,
) -> SizeResult:
    seconds: list[float] = []
    inputs: list[Any] = []

    def alone() -> Any:
        inputs.append(batch(size))
        with no_sync():
            loss = step(inputs[0])
        _wait(device)
        return loss

    def timed() -> Any:
        loss = None
        for repeat in range(_WARM_UPS + repeats):
            begun = time.perf_counter()
            loss = step(inputs[0])
            _wait(device)
            if repeat >= _WARM_UPS:
                seconds.append(time.perf_counter() - begun)
        return loss

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    failure: Failure | None = None
    for run in (alone, timed):
        failure = agree(attempt(run, deadline_seconds), device)
        if failure is not None:
            break
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    inputs.clear()
    _clear(trained)
    if failure is not None:
        release(device)
        return SizeResult(size, failure.outcome.name.lower(), failure.reason, peak_bytes=peak)
    return SizeResult(size, "ok", None, tuple(slowest(seconds, device)), peak)


def _optimizer_state(
    trained: list[nn.Parameter],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None,
    device: torch.device,
    deadline_seconds: float,
) -> tuple[Any, float, list[str]]:
    """The state of an optimizer after steps of size zero, the seconds of one step, and why it failed if it did."""
    if optimizer is None or not trained:
        return None, 0.0, []
    made: list[torch.optim.Optimizer] = []
    seconds: list[float] = [0.0]

    def run() -> None:
        made.append(optimizer(trained))
        for group in made[0].param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(_WARM_UPS + 1):
            begun = time.perf_counter()
            made[0].step()
            _wait(device)
            seconds[0] = time.perf_counter() - begun

    failure = agree(attempt(run, deadline_seconds), device)
    _clear(trained)
    if failure is not None:
        release(device)
        return None, 0.0, [f"the optimizer's state is left out: {failure.reason}"]
    return made, slowest(seconds, device)[0], []


def _recommend(
    results: list[SizeResult],
    asked: tuple[int, ...],
    optimizer_seconds: float,
    effective_batch_size: int | None,
    notes: list[str],
) -> StepRecommendation:
    fit = [result for result in results if result.outcome == "ok"]
    if not fit:
        notes.append("no size fits")
        return StepRecommendation(None, None, None, None, optimizer_seconds, tuple(results), tuple(notes))
    share = _share(effective_batch_size)

    def rate(result: SizeResult) -> float:
        overhead = optimizer_seconds * result.micro_batch_size / share if share else 0.0
        return result.micro_batch_size / (result.mean_seconds + overhead)

    best = max(fit, key=rate)
    tried_all = len(results) == len(asked) or results[-1].outcome == Outcome.OUT_OF_MEMORY.name.lower()
    return StepRecommendation(
        best.micro_batch_size,
        share // best.micro_batch_size if share else None,
        rate(best),
        _confidence([rate(r) for r in fit], [_spread(r) for r in fit], fit.index(best), complete=tried_all),
        optimizer_seconds,
        tuple(results),
        tuple(notes),
    )


def _confidence(rates: list[float], spreads: list[float], best: int, *, complete: bool) -> int:
    """Return the share of random draws in which `best` is within the tolerance of the fastest size.

    Means are drawn from the measured means and their errors. All sizes that were not tried count as one more size,
    which is as fast as the best, give or take 10%.
    """
    means = torch.tensor([*rates, *([] if complete else [rates[best]])], dtype=torch.float64)
    errors = torch.tensor([*spreads, *([] if complete else [_UNKNOWN_SPREAD])], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = means * (1 + errors * torch.randn(_DRAWS, len(means), generator=generator, dtype=torch.float64))
    good = drawn[:, best] >= (1 - TOLERANCE) * drawn.max(dim=1).values
    return min(99, int(100 * float(good.double().mean())))


def _spread(result: SizeResult) -> float:
    """The relative standard error of the mean."""
    times = torch.tensor(result.seconds, dtype=torch.float64)
    if len(times) < 2:
        return _UNKNOWN_SPREAD
    return max(_LEAST_SPREAD, float(times.std() / times.mean() / len(times) ** 0.5))


def _sizes(sizes: Iterable[int], effective_batch_size: int | None) -> tuple[int, ...]:
    share = _share(effective_batch_size)
    found = tuple(sorted({size for size in sizes if size > 0 and (share is None or share % size == 0)}))
    if not found:
        raise ValueError(f"no micro-batch size divides the {share} sequences that each process has in a step")
    return found


def _share(effective_batch_size: int | None) -> int | None:
    """Return the number of sequences that each process has in a whole step."""
    if effective_batch_size is None:
        return None
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = torch.distributed.get_world_size() if several else 1
    if effective_batch_size % processes:
        raise ValueError(f"{effective_batch_size} sequences cannot be shared by {processes} processes")
    return effective_batch_size // processes


def _late(begun: float, max_seconds: float) -> Failure | None:
    return Failure(Outcome.TIMED_OUT, "the time is used up") if time.monotonic() - begun > max_seconds else None


@contextlib.contextmanager
def _left_alone(trained: Sequence[nn.Parameter], device: torch.device) -> Iterator[None]:
    """Save gradients and random states, and restore them at the end."""
    gradients = [parameter.grad for parameter in trained]
    states = (torch.get_rng_state(), random.getstate())
    cuda = torch.cuda.get_rng_state_all() if device.type == "cuda" else None
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    _clear(trained)
    try:
        yield
    finally:
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
        release(device)


def _clear(trained: Sequence[nn.Parameter]) -> None:
    for parameter in trained:
        parameter.grad = None


def _device(trained: Sequence[nn.Parameter]) -> torch.device:
    if trained:
        return trained[0].device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
