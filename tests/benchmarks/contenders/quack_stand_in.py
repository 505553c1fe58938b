"""What `quack.gemm_interface` computes, in plain torch: its signatures, its layouts, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

_GATES = {"swiglu": F.silu, "reglu": F.relu}


@dataclass(frozen=True)
class GemmConfig:
    """A tile; quack's default is dynamic."""

    tile_m: int
    tile_n: int
    cluster_m: int
    pingpong: bool
    is_dynamic_persistent: bool = True


def modules() -> dict[str, ModuleType]:
    """What to put into `sys.modules`."""
    interface = ModuleType("quack.gemm_interface")
    found = {"gemm": gemm, "gemm_tuned": Tuned, "gemm_gated": gemm_gated, "gemm_dgated": gemm_dgated}
    for name, function in found.items():
        setattr(interface, name, function)
    configurations = ModuleType("quack.gemm_config")
    configurations.GemmConfig = GemmConfig  # type: ignore[attr-defined]  # what a module has is not declared
    return {module.__name__: module for module in (ModuleType("quack"), interface, configurations)}


def gemm(
    A: Tensor,
    B: Tensor,
    out: Tensor | None = None,
    *,
    cu_seqlens_m: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    A_idx: Tensor | None = None,
    concat_layout: tuple[str, ...] | None = None,
    tuned: bool = True,
) -> Tensor:
    """Rows by groups (`cu_seqlens_m`), or sums by groups (`cu_seqlens_k`)."""
    assert not tuned, "nobody waits for a search"
    concatenated = concat_layout or ()
    if cu_seqlens_m is not None:
        return _rows(A, B, cu_seqlens_m, A_idx, interleaved="B" in concatenated)
    assert cu_seqlens_k is not None
    assert out is not None
    assert A.stride(-2) == 1, "m-major"
    assert B.stride(-1) == 1, "n-major"
    columns = A if A_idx is None else A.index_select(1, _indices(A_idx))
    for expert, (start, end) in enumerate(_spans(cu_seqlens_k)):
        product = columns[:, start:end] @ B[start:end]
        if "out" in concatenated:
            product = _separated(product, _axis(out))
        out[expert] = product
    return out


class Tuned:
    """`fn` is the product with a tile, which nobody searches."""

    tiles: ClassVar[list[GemmConfig | None]] = []
    """Those of all calls."""

    @classmethod
    def fn(
        cls,
        A: Tensor,
        B: Tensor,
        out: Tensor,
        *,
        cu_seqlens_k: Tensor,
        A_idx: Tensor,
        concat_layout: tuple[str, ...] | None,
        config: GemmConfig | None,
    ) -> None:
        """Sums by groups."""
        assert config is None or not config.is_dynamic_persistent, "Hopper's kernels do not gather under it"
        cls.tiles.append(config)
        gemm(A, B, out, cu_seqlens_k=cu_seqlens_k, A_idx=A_idx, concat_layout=concat_layout, tuned=False)


def gemm_gated(
    A: Tensor,
    B: Tensor,
    *,
    activation: str,
    cu_seqlens_m: Tensor,
    A_idx: Tensor,
    store_preact: bool,
    concat_layout: tuple[str, ...],
    tuned: bool,
) -> tuple[Tensor | None, Tensor]:
    """The pre-activation, gate and up side by side, and the activation."""
    pre = gemm(A, B, cu_seqlens_m=cu_seqlens_m, A_idx=A_idx, concat_layout=concat_layout, tuned=tuned)
    hidden = _GATES[activation](pre[:, ::2]) * pre[:, 1::2]
    return pre if store_preact else None, hidden


def gemm_dgated(
    A: Tensor,
    B: Tensor,
    PreAct: Tensor,
    *,
    activation: str,
    colvec_scale: Tensor,
    colvec_reduce: bool,
    cu_seqlens_m: Tensor,
    A_idx: Tensor,
    dynamic_scheduler: bool,
    config: GemmConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the pre-activation, the scaled activation, and each row's product of activation and gradient."""
    assert colvec_reduce
    assert not dynamic_scheduler, "Hopper's kernels do not gather under it"
    assert not config.is_dynamic_persistent, "nor under this"
    assert colvec_scale.dtype is torch.float32
    grad = gemm(A, B, cu_seqlens_m=cu_seqlens_m, A_idx=A_idx, tuned=False)
    with torch.enable_grad():
        gate, up = (PreAct[:, first::2].detach().requires_grad_() for first in (0, 1))
        hidden = _GATES[activation](gate) * up
    scale = colvec_scale.unsqueeze(-1).to(grad.dtype)
    gradients = torch.autograd.grad(hidden, (gate, up), grad * scale)
    return (
        torch.stack(gradients, dim=-1).flatten(1),
        (hidden * scale).detach(),
        (hidden * grad).sum(-1).float().detach(),
    )


def _rows(A: Tensor, B: Tensor, bounds: Tensor, A_idx: Tensor | None, *, interleaved: bool) -> Tensor:
    assert A.stride(-1) == 1, "k-major"
    rows = A if A_idx is None else A.index_select(0, _indices(A_idx))
    matrices = _interleaved(B, _axis(B)) if interleaved else B
    return torch.cat([rows[start:end] @ matrices[expert] for expert, (start, end) in enumerate(_spans(bounds))])


def _indices(indices: Tensor) -> Tensor:
    assert indices.dtype is torch.int32
    return indices


def _spans(bounds: Tensor) -> list[tuple[int, int]]:
    assert bounds.dtype is torch.int32
    return list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))


def _axis(matrices: Tensor) -> int:
    """The axis of (E, M, N) along which the matrices are not contiguous: the one that `concat_layout` means."""
    return -2 if matrices.stride(-1) == 1 else -1


def _interleaved(matrices: Tensor, axis: int) -> Tensor:
    """[first; second] to first and second in turns."""
    halves: Tensor = matrices.unflatten(axis, (2, -1))
    return halves.transpose(axis - 1, axis).flatten(axis - 1, axis)


def _separated(matrix: Tensor, axis: int) -> Tensor:
    """First and second in turns to [first; second]."""
    pairs: Tensor = matrix.unflatten(axis, (-1, 2))
    return pairs.transpose(axis - 1, axis).flatten(axis - 1, axis)
