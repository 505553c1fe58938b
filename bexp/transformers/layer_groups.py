"""Recomputes groups of consecutive layers of a transformers model, each group as one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bexp.transformers.settings import SettingsError

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class LayerGroup:
    """`size` layers of a model, which calls them one after another, each with arguments of its own.

    Each layer but the last only notes its call, and returns the hidden states that it got. The last one runs all noted
    calls under one checkpoint. A model that does anything with hidden states between its layers would compute something
    else, so a layer that does not get the group's own input raises SettingsError. A hook that only reads what such a
    layer returns sees the group's input.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._hidden: Tensor | None = None
        self._calls: list[Call] = []

    def function(self, place: int) -> Callable[..., Any]:
        """Return what runs the layer at `place`, from 0, in place of `torch.utils.checkpoint.checkpoint`."""
        return functools.partial(self._take, place)

    def _take(self, place: int, function: Callable[..., Any], *args: Any) -> Any:
        if place == 0:  # calls may be left of a step that failed
            self._hidden, self._calls = args[0] if args and isinstance(args[0], Tensor) else None, []
        hidden = self._hidden
        if hidden is None or not args or args[0] is not hidden or len(self._calls) != place:
            raise SettingsError(
                "this model does something with hidden states between its layers, so that groups of layers cannot be "
                "recomputed as one"
            )
        self._calls.append((function, args[1:]))
        if place + 1 < self._size:
            return hidden
        calls, self._hidden, self._calls = tuple(self._calls), None, []
        return checkpoint(functools.partial(_run, calls), hidden, use_reentrant=False, early_stop=False)


def _run(calls: tuple[Call, ...], hidden: Tensor) -> Any:
    """Run the calls one after another, each on the result of the one before."""
    out: Any = hidden
    for function, args in calls:
        if not isinstance(out, Tensor):
            raise SettingsError("a layer of this model returns more than hidden states, so that no group can run on it")
        out = function(out, *args)
    return out
