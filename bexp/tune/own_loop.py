"""Any other PyTorch loop in a trial: backward calls and optimizer steps are timed.

Its size stands in the command, or is that of its data loader. A loader whose size a trial can set takes several sizes.

The module is loaded while torch itself is, so it imports nothing of torch before the first optimizer steps.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
import weakref
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bexp.measure.heap import freeze_imports
from bexp.tune.link import SIZE, CannotSetError, asked, choice, connect, refusing, serving, switched_off
from bexp.tune.placeholders import APPLY

if TYPE_CHECKING:
    from bexp.tune.clock import Clock
    from bexp.tune.data_loader import SizedLoader
    from bexp.tune.lengths import Lengths
    from bexp.tune.link import Link
    from bexp.tune.micro_batches import MicroBatches


def patch(module: ModuleType) -> None:
    """Watch every optimizer of this process from now on."""
    loop = _Loop()
    module.register_optimizer_step_pre_hook(loop.before_step)
    module.register_optimizer_step_post_hook(loop.after_step)


class _Loop:
    """The loop of the first optimizer that steps. The process ends after a few of its steps."""

    def __init__(self) -> None:
        self._first: weakref.ref[Any] | None = None
        self._link: Link | None = None
        self._sized: SizedLoader | None = None
        self._device: Any = None
        self._early: list[tuple[float, int, int | None]] = []
        self._clock: Clock | None = None

    def before_step(self, optimizer: Any, given: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None) -> None:
        """Follow the optimizer if it is the first that is about to step."""
        if self._first is None:
            self._first = weakref.ref(optimizer)  # a Trainer drops it with its state before the next size
            self._begin(optimizer, has_closure=len(given) > 1 or bool((named or {}).get("closure")))

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Note that an optimizer has stepped."""
        if self._first is None or optimizer is not self._first():
            return
        if self._clock is not None:
            self._clock.end_step()
            if self._clock.is_over:
                self._end(self._clock)
        elif self._sized is not None:
            self._measure_next()  # the first step has served only to describe the loop

    def _begin(self, optimizer: Any, *, has_closure: bool) -> None:
        import torch  # noqa: PLC0415 - it is complete by now

        from bexp.tune.data_loader import followed  # noqa: PLC0415 - where it is followed
        from bexp.tune.ranks import Ranks  # noqa: PLC0415 - needs torch
        from bexp.tune.reply import describe_parameters  # noqa: PLC0415 - needs torch

        if serving:
            return
        kind = asked.get("kind", "a loop of its own")
        with refusing():
            _refuse_choice(kind)
            followed.check()
        parameters = _parameters(optimizer, torch.optim.Optimizer)
        self._link, ranks = connect(), Ranks()
        size = os.environ.get(SIZE)
        if self._link is not None:
            described = describe_parameters(parameters)
            own: dict[str, Any] = {"class_name": "loop", "kind": kind, "num_devices": ranks.number}
            self._sized = followed.sized if ranks.number == 1 else None
            own["takes_sizes"] = self._sized is not None
            if followed.other_size is not None:
                own["micro_batch_size"] = followed.other_size  # unless another loader has the size in braces
            if followed.lengths is not None:
                own["lengths"] = followed.lengths.describe()
            self._link.send({"event": "ready", "switched_off": switched_off, **own, **described, **asked})
        if size is None and not asked:
            os._exit(0)  # the trial says what is missing
        freeze_imports()
        backward = torch.Tensor.backward

        @functools.wraps(backward)
        def timed(*given: Any, **named: Any) -> Any:
            result = backward(*given, **named)  # type: ignore[no-untyped-call]  # torch has no types for it
            if self._clock is not None:
                self._clock.end_micro_step(followed.number, followed.positions)
            return result

        torch.Tensor.backward = timed  # type: ignore[method-assign]  # the loop calls it by this name
        self._device = optimizer.param_groups[0]["params"][0].device
        early = followed.early_steps()
        self._early = early[:-1] if has_closure else early  # the last one is run within this step
        if ranks.number == 1:  # else the others may be gone
            atexit.register(self._end_early)
        if self._sized is None:
            self._begin_clock(followed.lengths, followed.micro_batches)

    def _begin_clock(self, lengths: Lengths | None, micro_batches: MicroBatches | None) -> None:
        from bexp.tune.clock import ACCUMULATION, Clock  # noqa: PLC0415 - needs torch
        from bexp.tune.lengths import WORST_TIMES  # noqa: PLC0415 - needs torch
        from bexp.tune.ranks import Ranks  # noqa: PLC0415 - needs torch

        steps = WORST_TIMES // asked.get("given_steps", ACCUMULATION)
        clock = self._clock = Clock(self._device, Ranks(), steps)
        clock.micro_batches, clock.ran_longest = micro_batches, lengths is not None and lengths.is_known
        clock.are_alike = lengths is None or lengths.are_alike
        clock.accumulation_given = asked.get("given_steps")
        for early in self._early:
            clock.note(*early)
        self._early = []
        clock.begin_micro_step()

    def _end(self, clock: Clock) -> None:
        from bexp.tune.reply import measured  # noqa: PLC0415 - needs torch

        reply = measured(clock.figures)
        if self._link is None:
            os._exit(0)  # the command's code for its end is not for a trial
        self._link.send(reply)
        self._measure_next()

    def _end_early(self) -> None:
        """Send the figures of the steps so far if the loop has ended by itself, without an error."""
        if self._clock is not None and not self._clock.is_over and getattr(sys, "last_value", None) is None:
            self._clock.end_early()
            if self._clock.has_figures:
                self._end(self._clock)

    def _measure_next(self) -> None:
        """Wait for the next size, and begin with it. The process ends when the trial wants no more of it."""
        assert self._link is not None, "it has said what it is"
        from bexp.tune.data_loader import followed  # noqa: PLC0415 - where it is followed

        command = self._link.receive()
        assert self._sized is not None, "only such a loop is asked for a size"
        if command["micro_batch_size"] != self._sized.size:
            self._early = []
        is_first = self._clock is None
        self._sized.set(command["micro_batch_size"], command.get("accumulation"))
        followed.number = followed.positions = None  # until the loop takes the first of the new ones
        self._begin_clock(self._sized.lengths, self._sized.micro_batches)
        assert self._clock is not None, "it has begun"
        self._clock.forgets_first_peak = not is_first  # the loop still holds what the last size has left


def _parameters(first: Any, kind: type) -> list[Any]:
    """Return the parameters of all optimizers: a loop may have several, and the first to step has only a part."""
    others = (each for each in gc.get_objects() if issubclass(type(each), kind))  # without those of gc.freeze()
    optimizers = [first, *others]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())


def _refuse_choice(kind: str) -> None:
    """Raise CannotSetError if there is a setting to try: only transformers' Trainer can take one."""
    for name in choice().keys() - {APPLY}:  # the trial says whom that is for
        raise CannotSetError(f"{kind} has no '{name}' that could be set: put {{{name}}} where the command takes it")
