"""What torch.compile does in a process of a training command: the seconds it takes, and for which size."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

_new: list[float] = []
"""Of each compilation since the last look."""
_has_compiled: list[bool] = []


_begun: list[float] = []
"""When the present compilation began."""


def patch(module: ModuleType) -> None:
    """Time each compilation of this process from now on, those of backward passes and of new shapes included."""
    module.callback_handler.register_start_callback(_begin)
    module.callback_handler.register_end_callback(_end)


def _begin(_: object) -> None:
    _begun[:] = [time.perf_counter()]


def _end(_: object) -> None:
    if _begun:
        _new.append(time.perf_counter() - _begun.pop())
        _has_compiled[:] = [True]


def new_seconds() -> float:
    """Return the seconds of the compilations since the last call; 0 without any."""
    seconds = sum(_new)
    _new.clear()
    return seconds


def compile_anew() -> None:
    """Have the next size compiled for itself, as in a run of its own.

    When the compiler meets a second size, it compiles for any size from then on.
    """
    if _has_compiled:
        _has_compiled.clear()
        sys.modules["torch._dynamo"].reset()  # which forgets who listens, too
        patch(sys.modules["torch._dynamo.callback"])


@contextmanager
def eagerly() -> Iterator[None]:
    """Run what is compiled as it was written, and compile nothing."""
    dynamo = sys.modules.get("torch._dynamo")  # which takes seconds to import, and whatever compiles has done it
    with nullcontext() if dynamo is None else dynamo.set_stance("force_eager"):
        yield


def is_compiled(model: Any) -> bool:
    """Return whether a part of a model is compiled: by `torch.compile`, by its own `compile`, or in its `forward`."""
    return any(
        "_orig_mod" in vars(each).get("_modules", ())
        or vars(each).get("_compiled_call_impl") is not None
        or hasattr(each.forward, "_torchdynamo_orig_callable")
        for each in (model.modules() if hasattr(model, "modules") else ())
    )
