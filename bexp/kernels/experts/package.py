"""What back ends of other packages share: whether the package is there, and which experts it computes."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import torch

from bexp.kernels.dtypes import dtype_name
from bexp.kernels.shapes import ExpertsShape


def package_reason(package: str, modules: tuple[str, ...]) -> str | None:
    """Return why the modules of a package cannot be imported, the first of which has its name; None if they can."""
    if find_spec(modules[0]) is None:
        return f"{package} is not installed"
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - they load compilers, whose libraries fail in ways of their own
            said = (str(error).splitlines() or [""])[0]
            return f"{package} cannot be imported: {type(error).__name__}: {said}"
    return None


def shape_reason(
    package: str, shape: ExpertsShape, dtypes: tuple[torch.dtype, ...], *, gated_silu: bool = False, multiple: int = 8
) -> str | None:
    """Return why a package does not compute these experts; None if it does."""
    if gated_silu and not (shape.gated and shape.activation == "silu"):
        kind = "gated" if shape.gated else "plain"
        return f"{package} computes experts with a gated silu, not with a {kind} {shape.activation}"
    if shape.dtype not in dtypes:
        known = " and ".join(dtype_name(dtype) for dtype in dtypes)
        return f"{package} takes {known}, not {dtype_name(shape.dtype)}"
    sizes = {"hidden_size": shape.hidden_size, "expert_ffn_hidden_size": shape.ffn_hidden_size}
    for name, size in sizes.items():
        if size % multiple:
            return f"{package} needs {name} to be a multiple of {multiple}, not {size}"
    return None
