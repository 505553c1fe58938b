"""accelerate's search for the largest batch that fits, switched off:

it would train with another batch after an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

from bexp.tune.link import switch_off

NAME = "find_executable_batch_size"


def patch(module: ModuleType) -> None:
    """Have each function that accelerate would call with smaller and smaller batch sizes get the first size alone."""

    @wraps(module.find_executable_batch_size)
    def find_nothing(function: Any = None, starting_batch_size: int = 128, *_: Any, **__: Any) -> Callable[..., Any]:
        if function is None:
            return partial(find_nothing, starting_batch_size=starting_batch_size)

        @wraps(function)
        def run_once(*given: Any, **named: Any) -> Any:
            switch_off(NAME)
            return function(starting_batch_size, *given, **named)

        return run_once

    vars(module)[NAME] = find_nothing
