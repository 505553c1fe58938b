"""Triton's interpreter, which runs kernels in NumPy when TRITON_INTERPRET=1 is set before they are built."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.waits import PATIENCE_SECONDS


def is_interpreting() -> bool:
    """Whether this process builds kernels for the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def run_in_interpreter(file: str, *options: str) -> None:
    """Run the tests of a file in a process that builds its kernels for the interpreter."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file, *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


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
