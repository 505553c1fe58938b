"""Triton's interpreter, which runs kernels on the host: small shapes only, and no bfloat16."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.bexp.kernels.triton_interpreter import accept_scalars_of_one_element

_WARNING = "Conversion of an array with ndim > 0"
"""NumPy's, about the interpreter; from 2.4 on it is an error."""


def unavailable() -> str | None:
    """Why kernels cannot be interpreted here; null if they can. Must run before any kernel module is imported."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.is_available():
        return "the kernels run on the CUDA device: tests/gpu"
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime.errors import InterpreterError

    accept_scalars_of_one_element()

    from bexp.kernels.experts.triton_gemm import multiply_rows

    one = torch.ones(1, 1, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _WARNING)
        try:
            multiply_rows(one, one[None], torch.ones(1, dtype=torch.int32))
        except InterpreterError as error:
            return f"Triton's interpreter does not run here: {error}"
    return None


_REASON = unavailable()


def interpreted(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test that needs the interpreter."""
    ignored = pytest.mark.filterwarnings(f"ignore:{_WARNING}", "ignore:invalid value encountered")
    return pytest.mark.skipif(_REASON is not None, reason=_REASON or "")(ignored(test))  # type: ignore[no-any-return]
