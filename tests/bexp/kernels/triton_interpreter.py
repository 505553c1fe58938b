"""Triton's interpreter, which runs kernels in NumPy when TRITON_INTERPRET=1 is set before they are built."""

from __future__ import annotations

import os
from typing import Any


def is_interpreting() -> bool:
    """Whether this process builds kernels for the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def accept_scalars_of_one_element() -> None:
    """Let loops run to a bound that was loaded: the interpreter keeps it in an array of one element.

    NumPy from 2.4 on makes no integer of such an array.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "accepts_one_element", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.accepts_one_element = True  # type: ignore[attr-defined]  # known here
    interpreter._patch_lang_tensor = patched
