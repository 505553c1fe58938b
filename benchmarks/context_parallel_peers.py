"""A public ring implementation as a contender: zhuzilin's ring-flash-attention.

    pip install ring-flash-attn   # or a checkout of https://github.com/zhuzilin/ring-flash-attention in PYTHONPATH

Its ring, stripe and zigzag variants call two functions of `flash_attn` for each block. If that package is not
installed, this module provides the two functions, over the same block attention that our layouts use. Then everything
around the kernel differs: the exchange, the merging and the buffers. One copy is added: flash_attn writes a block's
gradients into given buffers, while torch's operators return them. The package is made for half precision. In float32 it
mistakes a buffer for its converted copy, and its gradients are wrong.

Only the modules with these variants are imported, because the whole package also needs transformers and the kernels for
packed sequences. Afterwards `sys.modules` is as before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from torch import Tensor

from bexp.kernels.context_parallel.blocks import block_attention

PACKAGE, KERNELS, INTERFACE = "ring_flash_attn", "flash_attn", "flash_attn.flash_attn_interface"
VARIANTS = {
    "ring": ("ring_flash_attn", "ring_flash_attn_func"),
    "striped": ("stripe_flash_attn", "stripe_flash_attn_func"),
    "zigzag": ("zigzag_ring_flash_attn", "zigzag_ring_flash_attn_func"),
}
"""The module and the function for tokens that are laid out as in one of our layouts."""
PEERS = {"rfa ring": "ring", "rfa stripe": "striped", "rfa zigzag": "zigzag"}
"""The contenders' names, and their layouts."""

RingAttention = Callable[..., Tensor]
"""(q, k, v of (B, S / N, heads, D), causal=, group=) -> (B, S / N, H, D)."""


class PeerMissingError(Exception):
    """The package is not installed, or its kernels are not the requested ones."""


def peer_attention(layout: str, backend: str) -> RingAttention:
    """The variant for one of our layouts, on the block attention called `backend`.

    Raises:
        PeerMissingError: it is not available here; the message says why.
    """
    return _load(backend)[layout]


def describe_peer() -> dict[str, Any]:
    """Return its version and the kernels that it runs on, or why it is left out."""
    if importlib.util.find_spec(PACKAGE) is None:
        return {"reason": f"{PACKAGE} is not installed"}
    kernels = f"flash_attn {_version('flash-attn') or ''}".rstrip() if _has_kernels() else "torch's, as our layouts"
    return {"version": _version("ring-flash-attn") or "a checkout", "kernels": kernels}


@functools.cache
def _load(backend: str) -> dict[str, RingAttention]:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.submodule_search_locations is None:
        raise PeerMissingError(f"{PACKAGE} is not installed")
    package = ModuleType(PACKAGE)
    package.__path__ = list(found.submodule_search_locations)
    modules = {PACKAGE: package}
    if not _has_kernels():
        kernels = ModuleType(KERNELS)
        kernels.__path__ = []
        modules |= {KERNELS: kernels, INTERFACE: flash_interface(backend)}
    elif backend != "flash":
        raise PeerMissingError(f"{KERNELS} is installed: {PACKAGE} runs on its kernels, not on {backend}'s")
    with _in_place_of(modules):
        return {
            layout: getattr(importlib.import_module(f"{PACKAGE}.{module}"), function)
            for layout, (module, function) in VARIANTS.items()
        }


def flash_interface(backend: str) -> ModuleType:
    """The functions of `flash_attn.flash_attn_interface` that ring-flash-attention calls, over our block attention.

    Tensors are (B, S, heads, D), the log-sum-exp is (B, H, S). The parameters are those of flash_attn 2.7 and later;
    the caller reads them, to set what it knows of.
    """
    block = block_attention(backend)

    def _flash_attn_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
    ) -> tuple[Tensor, Tensor, None, None]:
        _check_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
        out, lse = block.forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal, softmax_scale)
        return out.transpose(1, 2), lse, None, None

    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        rng_state: Tensor | None = None,
    ) -> None:
        _check_plain(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
        grad, q_, k_, v_, out_ = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        grads = block.backward(grad, q_, k_, v_, out_, softmax_lse.contiguous(), causal, softmax_scale)
        for place, gradient in zip((dq, dk, dv), grads, strict=True):
            place.copy_(gradient.transpose(1, 2))

    module = ModuleType(INTERFACE)
    vars(module).update(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)
    return module


def _check_plain(dropout_p: float, left: int, right: int, softcap: float, slopes: Tensor | None) -> None:
    assert dropout_p == 0 and left == right == -1 and softcap == 0 and slopes is None, "plain attention is asked for"


def _has_kernels() -> bool:
    return importlib.util.find_spec(KERNELS) is not None


@contextlib.contextmanager
def _in_place_of(modules: dict[str, ModuleType]) -> Iterator[None]:
    """These modules in `sys.modules`; afterwards everything of their packages is there that was before."""
    tops = {name.partition(".")[0] for name in modules}

    def taken() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in tops}

    before = taken()
    sys.modules.update(modules)
    try:
        yield
    finally:
        taken()
        sys.modules.update(before)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
