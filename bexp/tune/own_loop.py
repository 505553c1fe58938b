"""Any other PyTorch loop in a trial: its size stands in the command, and backward calls and optimizer steps are timed.

The module is loaded while torch itself is, so it imports nothing of torch before the first optimizer steps.
"""

from __future__ import annotations

import functools
import os
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bexp.tune.link import SIZE, CannotSetError, asked, choice, connect, refusing
from bexp.tune.placeholders import APPLY

if TYPE_CHECKING:
    from bexp.tune.link import Link
    from bexp.tune.measuring import Clock


def patch(module: ModuleType) -> None:
    """Watch every optimizer of this process from now on."""
    loop = _Loop()
    module.register_optimizer_step_pre_hook(loop.before_step)
    module.register_optimizer_step_post_hook(loop.after_step)


class _Loop:
    """Follows the first optimizer that steps, and ends the process after a few of its steps."""

    def __init__(self) -> None:
        self._first: weakref.ref[Any] | None = None
        self._link: Link | None = None
        self._clock: Clock | None = None

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """An optimizer is about to step: the first of all is the one that is followed."""
        if self._first is None:
            self._first = weakref.ref(optimizer)  # a Trainer drops it with its state before the next size
            self._begin(optimizer)

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has stepped."""
        if self._clock is None or self._first is None or optimizer is not self._first():
            return
        self._clock.end_step()
        if self._clock.is_over:
            self._end(self._clock)

    def _begin(self, optimizer: Any) -> None:
        import torch  # noqa: PLC0415 - it is complete by now

        from bexp.tune.data_loader import followed  # noqa: PLC0415 - where it is followed
        from bexp.tune.lengths import WORST_TIMES  # noqa: PLC0415 - needs torch
        from bexp.tune.measuring import (  # noqa: PLC0415 - needs torch
            ACCUMULATION,
            Clock,
            Ranks,
            describe_parameters,
            serving,
        )

        if serving:
            return
        kind = asked.get("kind", "a loop of its own")
        with refusing():
            _refuse_choice(kind)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._link, ranks = connect(), Ranks()
        size = os.environ.get(SIZE)
        if self._link is not None:
            described = describe_parameters(parameters)
            own: dict[str, Any] = {"class_name": "loop", "kind": kind, "num_devices": ranks.number}
            if followed.lengths is not None:
                own["lengths"] = followed.lengths.describe()
            self._link.send({"event": "ready", **own, **described, **asked})
        if size is None and not asked:
            os._exit(0)  # the trial says what is missing
        steps = WORST_TIMES // min(ACCUMULATION, asked.get("grad_accum_steps", ACCUMULATION))
        clock = self._clock = Clock(parameters[0].device, ranks, steps)
        clock.micro_batches, clock.ran_longest = followed.micro_batches, followed.lengths is not None
        backward = torch.Tensor.backward

        @functools.wraps(backward)
        def timed(*given: Any, **named: Any) -> Any:
            result = backward(*given, **named)  # type: ignore[no-untyped-call]  # torch has no types for it
            clock.end_micro_step(followed.number, followed.positions)
            return result

        torch.Tensor.backward = timed  # type: ignore[method-assign]  # the loop calls it by this name
        clock.begin_micro_step()

    def _end(self, clock: Clock) -> None:
        from bexp.tune.measuring import measured  # noqa: PLC0415 - needs torch

        reply = measured(clock.figures)
        if self._link is not None:
            self._link.send(reply)
            self._link.receive()  # the process ends when the trial has read it
        os._exit(0)  # what the command does at its end is not for a trial


def _refuse_choice(kind: str) -> None:
    """Raise CannotSetError if there is a setting to try: outside transformers' Trainer nothing could take it."""
    for name in choice().keys() - {APPLY}:  # the trial says whom that is for
        raise CannotSetError(f"{kind} has no '{name}' that could be set: put {{{name}}} where the command takes it")
