from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from bexp.kernels.context_parallel.attention import context_parallel_reason
from bexp.kernels.context_parallel.blocks import BlockAttention, block_attention
from bexp.kernels.context_parallel.layouts import LAYOUTS, context_parallel_layout
from bexp.kernels.context_parallel.merging import RunningAttention, merge_block
from bexp.kernels.context_parallel.ring import Ring
from bexp.kernels.context_parallel.ring_attention import RingAttention
from bexp.kernels.shapes import AttentionShape
from tests.bexp.kernels import context_parallel_ranks as ranks
from tests.bexp.kernels import references
from tests.bexp.kernels.thread_ring import run_ranks
from tests.bexp.kernels.triton_interpreter import is_interpreting, run_in_interpreter

pytestmark = pytest.mark.slow(together="forked")

TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2}
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What four processes found out together."""
    return ranks.launch(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", ranks.cases(), ids=lambda case: case.name)
def test_output_and_gradients(found: Found, case: ranks.Case) -> None:
    for rank in found:
        assert set(rank[case.name]) == {"out", "dq", "dk", "dv"}
        assert max(rank[case.name].values()) <= TOLERANCES[case.dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_are_those_of_the_layout_and_what_is_sharded_is_gathered_in_order(found: Found, layout: str) -> None:
    for rank in found:
        assert rank[f"rotary-{layout}"]["out"] <= 1e-5
        assert set(rank[f"sharding-{layout}"].values()) == {0.0}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_refusals_give_the_reason(found: Found, layout: str) -> None:
    multiple = 8 if layout == "zigzag" else 4
    length = f"the {layout} layout over 4 ranks takes sequence lengths that are a multiple of {multiple}, not "
    shapes = "(2, 4, 6, 16), (2, 2, 4, 16) and (2, 2, 4, 16)"
    expected = {
        "length": length + "25",
        "shard": length + "25",
        "heads": "2 key heads do not divide 3 query heads",
        "keys": f"context parallelism takes queries (B, H, S, D) and keys and values (B, G, S, D), not {shapes}",
        "dtype": "queries, keys and values have one dtype",
        "tile": "a BTA tile divides the batch: 3 does not divide 2",
        "cudnn": "cuDNN attention needs a CUDA device, not cpu",
        "backend": "context parallelism has no attention back end 'fa9'; there are flash, cudnn, math",
    }
    if layout == "zigzag":
        expected["odd"] = length + "20"
    for rank in found:
        assert rank[f"refusals-{layout}"] == expected


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pair_is_attended_to_once(layout: str, num_ranks: int) -> None:
    spread = context_parallel_layout(layout)
    for length in (2 * num_ranks, 10 * num_ranks):
        positions = [spread.positions(length, num_ranks, rank) for rank in range(num_ranks)]
        assert torch.equal(torch.cat(positions).sort().values, torch.arange(length))
        for causal in (True, False):
            seen = torch.zeros(length, length, dtype=torch.int64)
            for rank in range(num_ranks):
                before = int(seen.sum())
                for i, step in enumerate(spread.steps(rank, num_ranks, length // num_ranks, causal=causal)):
                    if step is None:
                        continue
                    queries = positions[rank][step.first_query :]
                    keys = positions[(rank - i) % num_ranks][: step.num_keys]
                    assert len(queries) == len(keys) or not step.causal
                    block = torch.ones(len(queries), len(keys), dtype=torch.int64)
                    seen[queries[:, None], keys[None]] += block.tril() if step.causal else block
                assert int(seen.sum()) - before == spread.num_pairs(rank, num_ranks, length, causal=causal)
            wanted = torch.ones_like(seen)
            assert torch.equal(seen, wanted.tril() if causal else wanted)


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_ranks_compute_what_is_planned_and_no_more(layout: str, num_groups: int) -> None:
    length, num_ranks, generator = 80, 8, torch.Generator().manual_seed(0)
    data = [torch.randn(2, n, length, 8, generator=generator) for n in (4, num_groups, num_groups, 4)]
    inputs = references.leaves(data[:3])
    wanted = ranks.attention(inputs[0], inputs[1], inputs[2], causal=True, scale=None)
    wanted.backward(data[3].double())
    spread, flash = context_parallel_layout(layout), block_attention("flash")
    forward_pairs, backward_pairs = ([0] * num_ranks for _ in range(2))

    def run(ring: Ring) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        positions = spread.positions(length, num_ranks, ring.rank)

        def count(pairs: list[int], q: torch.Tensor, k: torch.Tensor, causal: bool) -> None:
            num = q.shape[2] * (q.shape[2] + 1) // 2 if causal else q.shape[2] * k.shape[2]
            pairs[ring.rank] += num * q.shape[0] * q.shape[1]

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> object:
            count(forward_pairs, q, k, causal)
            return flash.forward(q, k, v, causal, scale)

        def backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *rest: object) -> object:
            count(backward_pairs, q, k, bool(rest[-2]))
            return flash.backward(grad, q, k, *rest)  # type: ignore[arg-type]  # a stand-in

        block = BlockAttention("counted", flash.unsupported_reason, forward, backward)  # type: ignore[arg-type]  # stand-ins
        steps = spread.steps(ring.rank, num_ranks, len(positions), causal=True)
        plan = RingAttention(ring, steps, block, 8**-0.5)
        q, k, v, gradient = (x[:, :, positions] for x in data)
        out, lse = plan.forward(q, k, v)
        grads = plan.backward(gradient, q, k, v, out, lse)
        expected = (wanted, *(x.grad for x in inputs))
        return [(a, None if e is None else e[:, :, positions]) for a, e in zip((out, *grads), expected, strict=True)]

    for rank, results in enumerate(run_ranks(num_ranks, run)):
        for actual, expected in results:
            scale = wanted.detach().norm()
            assert expected is not None
            assert (actual.double() - expected.detach()).norm() <= 1e-5 * scale
        planned = spread.num_pairs(rank, num_ranks, length, causal=True) * 2 * 4
        assert (forward_pairs[rank], backward_pairs[rank]) == (planned, planned)


runs_kernels = pytest.mark.skipif(
    not is_interpreting() and not torch.cuda.is_available(), reason="needs a CUDA device, or the interpreter"
)


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=runs_kernels)])
@pytest.mark.parametrize(("first_query", "head_size"), [(0, 16), (1, 16), (5, 24)])
def test_merging(first_query: int, head_size: int, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention to all keys out of attention to three parts, one of them with scores that would overflow."""
    device = torch.device("cuda" if fused and not is_interpreting() else "cpu")
    reason = None if fused else "torch"
    monkeypatch.setattr("bexp.kernels.context_parallel.merging.triton_reason", lambda _: reason)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 11, head_size, generator=generator).to(device) for _ in range(3))
    block = block_attention("math")
    parts = [(0, 4, 1.0), (4, 8, 300.0), (8, 11, 1e-3)]
    k = torch.cat([k[:, :, first:last] * factor for first, last, factor in parts], dim=2)
    running = RunningAttention(len(parts))
    for first, last, _ in parts:
        start = 0 if first == 0 else first_query
        out, lse = block.forward(q[:, :, start:], k[:, :, first:last], v[:, :, first:last], False, 1.0)
        running.merge(out.transpose(1, 2).contiguous().transpose(1, 2), lse, start)
    out, lse = running.result()
    wanted, wanted_lse = block.forward(q.double(), k.double(), v.double(), False, 1.0)
    assert references.relative_error(out[:, :, first_query:], wanted[:, :, first_query:]) <= 1e-5
    assert references.relative_error(lse[:, :, first_query:], wanted_lse[:, :, first_query:]) <= 1e-5
    alone, alone_lse = block.forward(q.double(), k.double()[:, :, :4], v.double()[:, :, :4], False, 1.0)
    if first_query:
        assert references.relative_error(out[:, :, :first_query], alone[:, :, :first_query]) <= 1e-5
        assert references.relative_error(lse[:, :, :first_query], alone_lse[:, :, :first_query]) <= 1e-5


def test_half_precision_is_rounded_once() -> None:
    """Merged in bfloat16 as it goes, 256 blocks would lose the later ones."""
    out, block_out = torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 1, 8, dtype=torch.bfloat16)
    running = RunningAttention(257)
    running.merge(out.to(torch.bfloat16), torch.zeros(1, 1, 1), 0)
    for _ in range(256):
        running.merge(block_out, torch.zeros(1, 1, 1), 0)
    merged, merged_lse = running.result()
    assert merged.dtype == torch.bfloat16
    assert float(merged[0, 0, 0, 0]) == float(torch.tensor(256 / 257).to(torch.bfloat16))
    assert float(merged_lse) == pytest.approx(math.log(257), rel=256 * torch.finfo(torch.float32).eps)


def test_a_merge_in_place_leaves_earlier_queries_alone() -> None:
    out, lse = torch.ones(1, 1, 3, 4), torch.zeros(1, 1, 3)
    merged_lse = merge_block(out, lse, torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2), 1, out)
    assert out[0, 0, :, 0].tolist() == pytest.approx([1.0, 0.5, 0.5])
    assert merged_lse[0, 0].tolist() == pytest.approx([0.0, 0.6931, 0.6931], abs=1e-3)


@runs_kernels
@pytest.mark.parametrize("dtypes", [*itertools.product((torch.float16, torch.float32), repeat=2)])
def test_the_kernel_merges_as_torch_does(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    from bexp.kernels.context_parallel.merging_kernel import merge_rows

    device = torch.device("cpu" if is_interpreting() else "cuda")
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(2, 70, 5, 24, generator=generator).to(dtypes[0]).transpose(1, 2)
    other = torch.randn(2, 5, 69, 24, generator=generator).half()
    lse, other_lse = torch.randn(2, 5, 70, generator=generator), torch.randn(2, 69, 5, generator=generator)
    wanted = torch.empty_like(out, dtype=dtypes[1])
    wanted_lse = merge_block(out, lse, other, other_lse.transpose(1, 2), 1, wanted)
    into = torch.empty_like(out, dtype=dtypes[1], device=device)
    merged_lse = merge_rows(
        out.to(device), lse.to(device), other.to(device), other_lse.to(device).transpose(1, 2), 1, into
    )
    torch.testing.assert_close(into.cpu(), wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(merged_lse.cpu(), wanted_lse)


@pytest.mark.skipif(is_interpreting() or torch.cuda.is_available(), reason="the kernel runs in this process")
def test_the_kernel_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "-k", "kernel_merges or merging")


def test_an_unknown_layout_is_named_beside_those_that_exist() -> None:
    with pytest.raises(ValueError, match="unknown context-parallel layout 'spiral'; there are ring, striped, zigz"):
        context_parallel_layout("spiral")


@pytest.mark.parametrize(
    ("num_ranks", "layout", "backend", "device", "reason"),
    [
        (4, "zigzag", "flash", "cpu", None),
        (4, "ring", "math", "cuda", None),
        (
            8,
            "zigzag",
            "flash",
            "cpu",
            "the zigzag layout over 8 ranks takes sequence lengths that are a multiple of 16",
        ),
        (4, "ring", "flash", "cuda", "flash attention takes float16 and bfloat16, not float32"),
        (4, "ring", "cudnn", "cuda", "cuDNN attention takes float16 and bfloat16, not float32"),
    ],
)
def test_whether_a_model_is_served(num_ranks: int, layout: str, backend: str, device: str, reason: str | None) -> None:
    shape = AttentionShape(num_heads=4, num_query_groups=4, head_size=16, dtype=torch.float32, seq_length=40)
    said = context_parallel_reason(shape, num_ranks, layout, backend, torch.device(device))
    assert (said is None) == (reason is None)
    assert (said or "").startswith(reason or "")
