"""Ranks that share sequences as processes on the CPU, and write relative errors of their part by case."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bexp.explorer.model.model import ModelSpec
from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.kernels.context_parallel.layouts import LAYOUTS
from bexp.workers.targets.reference.attention_block import Rotary
from tests.bexp.kernels import references
from tests.bexp.kernels.rank_groups import join_groups, refusals_of
from tests.forked_ranks import fork_ranks, run_ranks

NUM_RANKS = 4
SIZES = (1, 2, 4)
Errors = dict[str, float]


@dataclass(frozen=True)
class Case:
    """Attention over groups of `size` ranks; sequences of `seq_length` tokens, `num_groups` of 4 heads' keys."""

    layout: str
    size: int
    num_groups: int = 2
    causal: bool = True
    num_sequences: int = 3
    seq_length: int = 48
    head_size: int = 16
    bta_tile: int | None = None
    backend: str = "flash"
    scale: float | None = None
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Of the case, all of it."""
        mask = "causal" if self.causal else "full"
        kind = {4: "mha", 2: "gqa", 1: "mqa"}[self.num_groups]
        return (
            f"{self.layout}-{self.size}-{kind}-{mask}-b{self.num_sequences}-s{self.seq_length}-d{self.head_size}-"
            f"t{self.bta_tile}-{self.backend}-{self.scale}-{self.dtype}"
        )


def cases() -> list[Case]:
    """What the ranks run."""
    found = [
        Case(layout, size, num_groups, causal)
        for size in (2, 4)
        for layout in LAYOUTS
        for num_groups in (4, 2, 1)
        for causal in (True, False)
    ]
    for layout in LAYOUTS:
        case = partial(Case, layout)
        found += [case(1), case(1, causal=False)]
        found += [case(4, num_sequences=4, bta_tile=tile) for tile in (1, 2, 4)]
        found += [case(4, num_groups, num_sequences=1) for num_groups in (4, 1)]
        found += [case(size, seq_length=8, backend=backend) for size in (2, 4) for backend in ("flash", "math")]
        found += [case(2, backend="math", causal=causal, dtype="float64") for causal in (True, False)]
        found += [case(4, scale=0.5, head_size=12), case(4, dtype="bfloat16")]
    found += [Case(layout, 4, seq_length=4) for layout in ("ring", "striped")]
    return found


def launch(folder: Path) -> list[dict[str, Any]]:
    """What every rank found, by case."""
    run_ranks(__name__, folder)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> Tensor:
    """Softmax attention in the inputs' precision; q (B, H, S, D), k and v (B, G, S, D)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1) @ v


def errors(case: Case, context: ContextParallel) -> Errors:
    """Of all ranks' outputs and gradients, from inputs that lie as an attention block lays them out."""
    generator = torch.Generator().manual_seed(case.seq_length)
    dtype = getattr(torch, case.dtype)

    def normal(num_heads: int) -> Tensor:
        shape = (case.num_sequences, case.seq_length, num_heads, case.head_size)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    whole, gradient = [normal(n) for n in (4, case.num_groups, case.num_groups)], normal(4)
    wanted_inputs = references.leaves(whole)
    wanted = attention(*(x.transpose(1, 2) for x in wanted_inputs), causal=case.causal, scale=case.scale).transpose(
        1, 2
    )
    wanted.backward(gradient.double())

    qkv = torch.cat([context.shard(x) for x in whole], dim=2).requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in qkv.split((4, case.num_groups, case.num_groups), dim=2))
    out = context.attention(q, k, v, causal=case.causal, scale=case.scale, backend=case.backend, bta_tile=case.bta_tile)
    out = out.transpose(1, 2)
    out.backward(context.shard(gradient))
    assert qkv.grad is not None
    assert out.dtype == qkv.grad.dtype == dtype
    found = {"out": references.relative_error(context.gather(out), wanted)}
    grads = qkv.grad.split((4, case.num_groups, case.num_groups), dim=2)
    for name, actual, expected in zip(("dq", "dk", "dv"), grads, wanted_inputs, strict=True):
        assert expected.grad is not None
        found[name] = references.relative_error(context.gather(actual), expected.grad)
    return found


def rotary_errors(context: ContextParallel) -> Errors:
    """Of attention with rotated queries and keys, put together again from all ranks."""
    model = ModelSpec(
        num_layers=1, hidden_size=64, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=64,
        seq_length=48, dtype="float32",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, model.seq_length, 8, model.head_size, generator=generator)

    def rotated(x: Tensor, positions: Tensor) -> list[Tensor]:
        rotary = Rotary(model, torch.device("cpu"))
        rotary.cos, rotary.sin = rotary.cos[positions], rotary.sin[positions]
        return [part.transpose(1, 2) for part in rotary.split(x.clone(), (4, 2, 2), 6)]

    wanted = attention(*rotated(qkv, torch.arange(model.seq_length)), causal=True, scale=None)
    out = context.attention(*rotated(context.shard(qkv), context.positions(model.seq_length)))
    return {"out": references.relative_error(context.gather(out, dim=2), wanted)}


def sharding_errors(context: ContextParallel) -> Errors:
    """Of a tensor that was cut up and put together again, along either of two axes; and of the gradient of a part."""
    x = torch.arange(2.0 * 48 * 16).reshape(2, 48, 16)
    found = {f"dim {dim}": references.relative_error(context.gather(context.shard(x, dim), dim), x) for dim in (1, 2)}
    leaf = x.clone().requires_grad_()
    torch.autograd.backward(context.shard(leaf), torch.ones(2, 48 // context.size, 16))
    mine = torch.zeros(48)
    mine[context.positions(48)] = 1
    return found | {"gradient": references.relative_error(leaf.grad, mine[:, None].expand_as(x))}


def refusals(context: ContextParallel) -> dict[str, str]:
    """What is said to what is not served; every rank refuses before it sends anything."""
    q, kv = torch.zeros(2, 4, 6, 16), torch.zeros(2, 2, 6, 16)
    calls: dict[str, Callable[[], object]] = {
        "length": lambda: context.positions(6 * context.size + 1),
        "shard": lambda: context.shard(torch.zeros(1, 6 * context.size + 1)),
        "heads": lambda: context.attention(torch.zeros(2, 3, 6, 16), kv, kv),
        "keys": lambda: context.attention(q, kv[:, :, :4], kv[:, :, :4]),
        "dtype": lambda: context.attention(q, kv.double(), kv.double()),
        "tile": lambda: context.attention(q, kv, kv, bta_tile=3),
        "cudnn": lambda: context.attention(q, kv, kv, backend="cudnn"),
        "backend": lambda: context.attention(q, kv, kv, backend="fa9"),
        "odd": lambda: context.attention(q[:, :, :5], kv[:, :, :5], kv[:, :, :5]),
    }
    return refusals_of(calls)


def run(folder: Path, rank: int) -> None:
    """Run everything, in the same order as the other ranks."""
    groups = join_groups(folder, rank, NUM_RANKS, SIZES)
    contexts = {(size, layout): ContextParallel(groups[size], layout) for size in SIZES for layout in LAYOUTS}
    found: dict[str, Any] = {case.name: errors(case, contexts[case.size, case.layout]) for case in cases()}
    for layout in LAYOUTS:
        context = contexts[4, layout]
        found[f"rotary-{layout}"] = rotary_errors(context)
        found[f"sharding-{layout}"] = sharding_errors(context)
        found[f"refusals-{layout}"] = refusals(context)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(run, Path(sys.argv[1])), NUM_RANKS))
