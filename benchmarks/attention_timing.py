"""Times attention back ends against each other without the profiler, in turns, and for longer than a trial.

Contenders take turns in an order that changes from round to round. The device does not pause between them, so a drift
of its clocks affects all alike. A contender that is clearly slower than the fastest drops out after a few rounds.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bexp.explorer.cost_model.components import Component, ComponentKind
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.spec.model import ModelSpec
from bexp.explorer.spec.request import ExplorationRequest
from bexp.kernels.attention import attention_backend
from bexp.measure.timing import standard_error
from bexp.workers.profiler.failures import classify
from bexp.workers.targets.reference.factory import build_block
from bexp.workers.targets.reference.shapes import attention_shape, torch_dtype

LOST, HOPELESS = 1.25, 2.0
"""A contender drops out if its median exceeds the fastest's by this factor, after `MIN_ROUNDS` and after the first."""
MIN_ROUNDS, SURE_ROUNDS, MAX_ROUNDS = 5, 15, 60
RELATIVE_ERROR = 0.001
"""Of every median that is left, from which on, after `SURE_ROUNDS`, no more rounds are made."""
WARM_UP_SECONDS = 0.3

Stopwatch = Callable[[Callable[[], None]], Callable[[], float]]
"""Issues a call; what it returns gives the seconds, once the device has been waited for."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A request's model, and how many of its sequences are run at once."""

    model: ModelSpec
    request: ExplorationRequest
    micro_batch_size: int


def block_pass(shape: Shape, name: str, device: torch.device) -> Callable[[], None]:
    """Forward and backward of a whole attention block: norm, projections, positions, attention."""
    model = shape.model
    component = Component(kind=ComponentKind.ATTENTION, micro_batch_size=shape.micro_batch_size, backend=name)
    generator = torch.Generator(device).manual_seed(0)
    block = build_block(model, component, shape.request, device, generator=generator)
    size = (shape.micro_batch_size, model.seq_length, model.hidden_size)
    dtype = torch_dtype(model.dtype)
    x, gradient = (torch.randn(size, dtype=dtype, device=device, generator=generator) for _ in range(2))
    x.requires_grad_()

    def run() -> None:
        x.grad = None
        torch.autograd.backward(block(x), gradient)

    return run


def core_pass(shape: Shape, name: str, device: torch.device) -> Callable[[], None]:
    """Forward and backward of attention alone, on tensors that lie as a block leaves them."""
    model, attend = shape.model, attention_backend(name).run
    heads, groups = model.num_attention_heads, model.query_groups
    generator = torch.Generator(device).manual_seed(0)

    def normal(num_heads: int) -> Tensor:
        size = (shape.micro_batch_size, model.seq_length, num_heads, model.head_size)
        return torch.randn(size, dtype=torch_dtype(model.dtype), device=device, generator=generator)

    parts = normal(heads + 2 * groups).split((heads, groups, groups), dim=2)
    q, k, v = (part.transpose(1, 2).requires_grad_() for part in parts)
    gradient = normal(heads).transpose(1, 2)

    def run() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v), gradient)

    return run


def time_back_ends(
    build: Callable[[Shape, str, torch.device], Callable[[], None]],
    shape: Shape,
    names: tuple[str, ...],
    device: torch.device,
    seconds: float,
) -> dict[str, dict[str, Any]]:
    """The outcome of every back end, with the median and spread of its rounds."""
    runs: dict[str, Callable[[], None]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        reason = attention_backend(name).unsupported_reason(attention_shape(shape.model), device)
        if reason is not None:
            found[name] = {"outcome": Outcome.UNSUPPORTED.value, "reason": reason}
            continue
        try:
            runs[name] = build(shape, name, device)
        except Exception as error:  # noqa: BLE001 - whatever a back end raises is its outcome
            found[name] = _failure(error)
    found |= time_in_turns(runs, stopwatch(device), device, seconds)
    runs.clear()
    _release(device)
    return {name: found[name] for name in names}


def time_in_turns(
    runs: dict[str, Callable[[], None]], watch: Stopwatch, device: torch.device, seconds: float
) -> dict[str, dict[str, Any]]:
    """Run rounds over all contenders that are left, until their medians are known well or the time is used up."""
    deadline = time.monotonic() + seconds
    found: dict[str, dict[str, Any]] = {}
    for name in tuple(runs):
        try:
            _warm_up(runs[name], device)
        except Exception as error:  # noqa: BLE001 - whatever a back end raises is its outcome
            found[name] = _failure(error)
            del runs[name]
        if name not in runs:
            _release(device)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle  # noqa: S311 - an order, not a secret
    while order:
        shuffle(order)
        pending = []
        for name in tuple(order):
            try:
                pending.append((name, watch(runs[name])))
            except torch.cuda.OutOfMemoryError as error:  # it fits alone, but not with the others' cached memory
                found[name] = _failure(error)
                order.remove(name)
                del runs[name], samples[name]
                _release(device)
        _synchronize(device)
        for name, read in pending:
            samples[name].append(read())
        if not order:
            break
        rounds = max(map(len, samples.values()))
        medians = {name: statistics.median(samples[name]) for name in runs}
        limit = (LOST if rounds >= MIN_ROUNDS else HOPELESS) * min(medians.values())
        order = [name for name in runs if medians[name] <= limit]  # one that has dropped out comes back if others slow
        errors = [standard_error(samples[name]) / medians[name] for name in order]
        is_sure = rounds >= SURE_ROUNDS and max(errors) <= RELATIVE_ERROR
        fewest = min(len(samples[name]) for name in order)
        if fewest >= MIN_ROUNDS and (len(order) == 1 or is_sure or time.monotonic() > deadline):
            break
        if rounds >= MAX_ROUNDS:
            break
    for name, values in samples.items():
        found[name] = {
            "outcome": Outcome.OK.value,
            "seconds": statistics.median(values),
            "standard_error_seconds": standard_error(values),
            "rounds": len(values),
        }
    return found


def stopwatch(device: torch.device) -> Stopwatch:
    """Device events around a call, after the second-level cache was overwritten; the clock on a CPU."""
    if device.type != "cuda":
        return _time_on_host
    flush = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)

    def watch(run: Callable[[], None]) -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        run()
        end.record()
        return lambda: float(start.elapsed_time(end)) / 1e3

    return watch


def _time_on_host(run: Callable[[], None]) -> Callable[[], float]:
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    return lambda: seconds


def _warm_up(run: Callable[[], None], device: torch.device) -> None:
    started = time.perf_counter()
    for _ in range(3):
        run()
        _synchronize(device)
        if time.perf_counter() - started > WARM_UP_SECONDS:
            return


def _failure(error: Exception) -> dict[str, Any]:
    outcome, reason = classify(error)
    return {"outcome": outcome.value, "reason": reason}


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
