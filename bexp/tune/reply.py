"""What a training replies to its trial: its parameters, and figures or why there are none."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bexp.error_place import first_line, place_of
from bexp.out_of_memory import is_out_of_memory


def describe_parameters(parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the parameters of a model and their bytes, for the search."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    dtypes = [str(parameter.dtype).removeprefix("torch.") for parameter in trained or parameters]
    return {
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        "trainable_bytes": sum(parameter.numel() * parameter.element_size() for parameter in trained),
        "dtype": max(set(dtypes), key=dtypes.count) if dtypes else "float32",
    }


def measured(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of `measure`, or the outcome of its error."""
    try:
        return {"outcome": "ok", **measure()}
    except Exception as error:  # noqa: BLE001 - the command is the caller's, and any failure of it is an outcome
        traceback.print_exc()
        return failed(error)


def failed(error: BaseException) -> dict[str, Any]:
    """Return the outcome of an error."""
    reason = f"{type(error).__name__}: {first_line(error)}"
    if is_out_of_memory(error):
        return {"outcome": "out_of_memory", "reason": reason}
    return {"outcome": "crashed", "reason": reason + place_of(error)}
