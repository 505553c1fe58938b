from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor

from bexp.explorer.cost.components import BlockRecompute
from bexp.kernels.tiling import tiled
from bexp.workers.targets.reference.attention_block import AttentionBlock
from tests.workers.targets.reference.models import CPU, small_model

BATCH = 8


def block(tile: int | None, backend: str = "math", recompute: BlockRecompute = BlockRecompute.NONE) -> AttentionBlock:
    return AttentionBlock(small_model(), backend=backend, bta_tile=tile, recompute=recompute, device=CPU, training=True)


def inputs() -> Tensor:
    return torch.randn(BATCH, 12, 48, generator=torch.Generator().manual_seed(1))


def kept_bytes(module: AttentionBlock, x: Tensor) -> int:
    """Bytes that a forward leaves alive for its backward beside its input and the weights, each storage once."""
    own = {t.untyped_storage().data_ptr() for t in (x, *module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)
    del out
    return sum(kept.values())


@pytest.mark.parametrize("recompute", [BlockRecompute.NONE, BlockRecompute.FULL])
@pytest.mark.parametrize("tile", [1, 4, 8])
def test_nothing_of_a_tile_is_kept_but_a_view_of_its_input(tile: int, recompute: BlockRecompute) -> None:
    x = inputs().requires_grad_()
    assert kept_bytes(block(None), x) > x.nbytes
    assert kept_bytes(block(tile, recompute=recompute), x) == 0


@pytest.mark.parametrize("recompute", [BlockRecompute.NONE, BlockRecompute.FULL])
def test_one_tiles_activations_exist_at_a_time(recompute: BlockRecompute) -> None:
    """Score matrices alive at once: of one tile in forward, and of one recomputed tile in backward."""
    module = block(2, recompute=recompute)
    alive: Counter[str] = Counter()
    peak = 0
    attend = module.attend

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal peak
        out = attend(q, k, v)
        size = out.shape[0]
        alive["tiles"] += size
        peak = max(peak, alive["tiles"])
        weakref.finalize(out.untyped_storage(), lambda: alive.subtract({"tiles": size}))
        return out

    module.attend = spy
    out = module(inputs().requires_grad_())
    out.sum().backward()
    gc.collect()
    assert peak == 2


def test_tiles_without_gradients_run_forward_once() -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(x.shape[0])
        return x * 2

    x = inputs()
    with torch.no_grad():
        out = tiled(function, x, 4)
    torch.testing.assert_close(out, x * 2)
    assert calls == [4, 4]
