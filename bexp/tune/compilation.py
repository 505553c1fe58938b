"""The seconds that torch.compile takes in a process of a training command."""

from __future__ import annotations

import time
from types import ModuleType

_new: list[float] = []
"""Of each compilation since the last look."""


def patch(module: ModuleType) -> None:
    """Time each compilation of this process from now on, those of backward passes and of new shapes included."""
    begun: list[float] = []

    def begin(_: object) -> None:
        begun[:] = [time.perf_counter()]

    def end(_: object) -> None:
        if begun:
            _new.append(time.perf_counter() - begun.pop())

    module.callback_handler.register_start_callback(begin)
    module.callback_handler.register_end_callback(end)


def new_seconds() -> float:
    """Return the seconds of the compilations since the last call; 0 without any."""
    seconds = sum(_new)
    _new.clear()
    return seconds
