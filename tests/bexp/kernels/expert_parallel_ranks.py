"""Ranks that run experts in parallel, and compare them with one process that has all tokens and experts."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bexp.kernels.activations import Activation
from bexp.kernels.context_parallel.ring import ring_group
from bexp.kernels.expert_parallel.experts import ExpertParallel, local_experts
from bexp.kernels.experts.registry import expert_backend
from bexp.workers.meshes.spread_experts import LocalPeers
from tests.bexp.kernels import references
from tests.bexp.kernels.rank_groups import join_groups, refusals_of
from tests.forked_ranks import fork_ranks, run_ranks
from tests.waits import PATIENCE_SECONDS

NUM_RANKS = 4
SIZES = (2, 4)
NUM_EXPERTS, HIDDEN, WIDTH = 8, 16, 24
NAMES = ("out", "x", "weights", "w_in", "w_out")
CAPACITIES = ((1, ()), (2, (0, 3)))


@dataclass(frozen=True)
class Case:
    """Experts over groups of `size` ranks; `tokens[r]` of them on rank r, whose routes follow Zipf(`skew`)."""

    size: int
    backend: str = "loop"
    top_k: int = 2
    overlap_degree: int = 1
    shadowed: tuple[int, ...] = ()
    tokens: tuple[int, ...] = (7, 5, 9, 3)
    skew: float = 1.0
    only_expert: int | None = None
    dtype: str = "float64"
    gated: bool = True
    transposed: bool = False
    frozen: bool = False
    recompute: bool = False
    capacity: int | None = None

    @property
    def name(self) -> str:
        """All of the case."""
        return "-".join(f"{key}:{value}" for key, value in vars(self).items()).replace(" ", "")


def cases() -> list[Case]:
    """What the ranks run."""
    everything = tuple(range(NUM_EXPERTS))
    found = [
        Case(size, top_k=top_k, overlap_degree=degree, shadowed=shadowed)
        for size in SIZES
        for top_k in (1, 2)
        for degree, shadowed in ((1, ()), (2, ()), (4, ()), (1, (0,)), (1, (0, 1, 5)), (2, (0, 3)), (1, everything))
    ]
    for size in SIZES:
        case = partial(Case, size)
        found += [case("bmm", overlap_degree=2, shadowed=(0, 7)), case("bmm")]
        found += [case("grouped_mm", overlap_degree=2, shadowed=(1,), dtype="float32")]
        found += [case(overlap_degree=2, shadowed=(2,), tokens=(0, 6, 0, 2)), case(tokens=(0, 0, 0, 0), shadowed=(1,))]
        found += [case(top_k=1, only_expert=expert, overlap_degree=2) for expert in (0, NUM_EXPERTS - 1)]
        found += [case(top_k=1, only_expert=3, shadowed=(3,))]
        found += [case(skew=0.0, top_k=NUM_EXPERTS), case(skew=3.0, overlap_degree=3)]
        found += [case(shadowed=(0, 6), transposed=True), case(gated=False, shadowed=(0, 6)), case(frozen=True)]
        found += [case(overlap_degree=2, shadowed=(0,), tokens=(0, 6, 0, 2), recompute=True)]
        found += [
            case(top_k=3, capacity=2, overlap_degree=degree, shadowed=shadowed) for degree, shadowed in CAPACITIES
        ]
        found += [case(capacity=1, tokens=(0, 6, 0, 2), overlap_degree=2), case(capacity=9)]
    return found


def gpu_cases() -> list[Case]:
    """What two GPUs run."""
    case = partial(Case, 2, dtype="bfloat16", tokens=(700, 300), skew=1.0)
    return [
        case(backend, overlap_degree=degree, shadowed=shadowed)
        for backend in ("grouped_mm", "fused", "loop")
        for degree, shadowed in ((1, ()), (2, ()), (4, (0, 1, 5)), (1, (0, 3)))
    ] + [case("grouped_mm", tokens=(0, 64), overlap_degree=2, shadowed=(1,), recompute=True)]


def launch(folder: Path, device: str = "cpu") -> list[dict[str, Any]]:
    """What every rank found, by case; on GPUs there are two ranks."""
    num_ranks = NUM_RANKS if device == "cpu" else 2
    run_ranks(__name__, folder, device)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(num_ranks)]


@dataclass(frozen=True)
class Problem:
    """Tensors of all ranks: the tokens, their routes, the experts' matrices, and the gradient of the result."""

    routes: Tensor
    inputs: list[Tensor]
    gradient: Tensor

    def part(self, tokens: tuple[int, ...], rank: int) -> slice:
        """The tokens of a rank."""
        return slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))


def problem(case: Case) -> Problem:
    """Draw the same problem on every rank."""
    generator = torch.Generator().manual_seed(7)
    num_tokens = sum(case.tokens[: case.size])

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, case.dtype))

    scores = -case.skew * torch.log(torch.arange(1.0, NUM_EXPERTS + 1))
    noise = -torch.log(-torch.log(torch.rand(num_tokens, NUM_EXPERTS, generator=generator).clamp(1e-6, 1 - 1e-6)))
    routes = (scores + noise).topk(case.top_k, dim=-1).indices
    if case.only_expert is not None:
        routes = torch.full_like(routes, case.only_expert)
    width_in = 2 * WIDTH if case.gated else WIDTH
    w_in, w_out = normal(NUM_EXPERTS, HIDDEN, width_in) / 4, normal(NUM_EXPERTS, WIDTH, HIDDEN) / 5
    inputs = [normal(num_tokens, HIDDEN), normal(num_tokens, case.top_k), w_in, w_out]
    return Problem(routes, inputs, normal(num_tokens, HIDDEN))


def is_kept(case: Case, drawn: Problem) -> Tensor:
    """1 for each pair that is among the `capacity` with the largest weights of its rank and expert, else 0."""
    kept, weights = torch.zeros_like(drawn.inputs[1], dtype=torch.float64), drawn.inputs[1]
    for rank in range(case.size):
        mine = drawn.part(case.tokens, rank)
        for expert in range(NUM_EXPERTS):
            pairs = (drawn.routes[mine] == expert).nonzero().tolist()
            pairs.sort(key=lambda pair: -float(weights[mine][tuple(pair)]))
            for token, k in pairs[: case.capacity]:
                kept[mine.start + token, k] = 1.0
    return kept


def errors(case: Case, group: dist.ProcessGroup, device: str = "cpu") -> dict[str, float]:
    """How far this rank's output and gradients are from those of one process."""
    drawn = problem(case)
    mine = drawn.part(case.tokens, group.rank())
    wanted_inputs = references.leaves(drawn.inputs)
    if drawn.routes.numel():
        x, weights, w_in, w_out = wanted_inputs
        kept = weights if case.capacity is None else weights * is_kept(case, drawn)
        wanted = references.experts(x, drawn.routes, kept, w_in, w_out, "silu")
        wanted.backward(drawn.gradient.double())
        expected = [wanted, *(leaf.grad for leaf in wanted_inputs)]
    else:
        expected = [torch.zeros_like(leaf) for leaf in (wanted_inputs[0], *wanted_inputs)]
    parts = [mine, mine, mine, *(2 * [slice(*_range(group))])]

    dtype = drawn.inputs[0].dtype
    tensors = [drawn.inputs[0][mine], drawn.inputs[1][mine]]
    tensors += [local_experts(w.mT.contiguous().mT if case.transposed else w, group) for w in drawn.inputs[2:]]
    leaves = references.leaves([each.to(device) for each in tensors], dtype)
    if case.frozen:
        leaves[0].requires_grad_(False)
    run = ExpertParallel(
        group,
        NUM_EXPERTS,
        expert_backend(case.backend).forward,
        overlap_degree=case.overlap_degree,
        shadowed_experts=case.shadowed,
        capacity_of=None if case.capacity is None else lambda _: case.capacity or 0,
    )
    x, weights, w_in, w_out = leaves
    forward = partial(run, x, drawn.routes[mine].to(device), weights, w_in, w_out, "silu")
    out = checkpoint(forward, use_reentrant=False) if case.recompute else forward()
    out.backward(drawn.gradient[mine].to(device))
    found = [out, *(leaf.grad for leaf in leaves)]
    assert out.dtype == dtype
    return {
        name: references.relative_error(actual, None if whole is None else whole[part])
        for name, actual, whole, part in zip(NAMES, found, expected, parts, strict=True)
        if not (case.frozen and name == "x")
    }


def _range(group: dist.ProcessGroup) -> tuple[int, int]:
    local = NUM_EXPERTS // group.size()
    return group.rank() * local, (group.rank() + 1) * local


def order(group: dist.ProcessGroup) -> list[str]:
    """In which order a step with two chunks and a shadowed expert exchanges and computes."""
    said: list[str] = []
    case = Case(group.size(), overlap_degree=2, shadowed=(0,), skew=0.0, tokens=(16, 16, 16, 16))
    drawn = problem(case)
    mine = drawn.part(case.tokens, group.rank())

    def experts(
        x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
    ) -> Tensor:
        which = "shadowed" if w_in.shape[0] == 1 else "own"
        said.append(f"{which} experts")
        out = expert_backend("loop").forward(x_TD, routes_TK, weights_TK, w_in, w_out, activation)
        out.register_hook(lambda _: said.append(f"backward of {which} experts"))
        return out

    def logged(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            if options.get("async_op"):
                said.append(name)
            return call(*args, **options)

        return run

    leaves = references.leaves([drawn.inputs[0][mine], drawn.inputs[1][mine]])
    leaves += references.leaves([local_experts(w, group) for w in drawn.inputs[2:]])
    run = ExpertParallel(group, NUM_EXPERTS, experts, overlap_degree=2, shadowed_experts=(0,))
    x, weights, w_in, w_out = leaves
    with ExitStack() as stack:
        for name, word in (("all_to_all_single", "rows"), ("broadcast", "broadcast"), ("reduce", "reduce")):
            stack.enter_context(mock.patch.object(dist, name, logged(word, getattr(dist, name))))
        run(x, drawn.routes[mine], weights, w_in, w_out, "silu").sum().backward()
    return said


def travelled(group: dist.ProcessGroup) -> list[int]:
    """How many rows each exchange of a forward pass moves whose tokens visit all experts."""
    moved: list[int] = []
    exchange = dist.all_to_all_single

    def counted(buffer: Tensor, tensor: Tensor, *args: Any, **options: Any) -> Any:
        if tensor.dim() == 2:
            moved.append(tensor.shape[0])
        return exchange(buffer, tensor, *args, **options)

    case = Case(group.size(), top_k=NUM_EXPERTS, skew=0.0, tokens=(5, 5))
    drawn = problem(case)
    mine = drawn.part(case.tokens, group.rank())
    run = ExpertParallel(group, NUM_EXPERTS, expert_backend("loop").forward)
    w_in, w_out = (local_experts(w, group) for w in drawn.inputs[2:])
    with mock.patch.object(dist, "all_to_all_single", counted):
        run(drawn.inputs[0][mine], drawn.routes[mine], drawn.inputs[1][mine], w_in, w_out, "silu")
    return moved


def _told(said: list[Tensor], x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, *others: Any) -> Tensor:
    """Run experts and note what they get."""
    said += [x_TD.detach(), routes_TK, weights_TK.detach()]
    return expert_backend("loop").forward(x_TD, routes_TK, weights_TK, *others)


def played(group: dist.ProcessGroup) -> list[bool]:
    """Whether experts get the same from ranks with equal tokens as from one rank that plays them, mode by mode."""
    found = []
    for degree, shadowed in ((1, ()), (3, ()), (2, (0, 3))):
        case = Case(group.size(), overlap_degree=degree, shadowed=shadowed, tokens=(9, 0, 0, 0))
        drawn = problem(case)
        got: list[list[Tensor]] = []
        for peers in (group, LocalPeers(group.size(), group.rank())):
            got.append([])

            experts = partial(_told, got[-1])
            run = ExpertParallel(peers, NUM_EXPERTS, experts, overlap_degree=degree, shadowed_experts=shadowed)
            x, weights = references.leaves(drawn.inputs[:2])
            w_in, w_out = references.leaves([local_experts(w, group) for w in drawn.inputs[2:]])
            for _ in range(2):  # the second knows its counts
                run(x, drawn.routes, weights, w_in, w_out, "silu").sum().backward()
            assert all(bool(leaf.grad.isfinite().all()) for leaf in (x, weights, w_in, w_out) if leaf.grad is not None)
        found.append(len(got[0]) == len(got[1]) and all(map(torch.equal, *got)))
    return found


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    """What is said to what is not served; every rank refuses before it sends anything."""
    forward = expert_backend("loop").forward
    make = partial(ExpertParallel, group, NUM_EXPERTS, forward)
    zeros = torch.zeros
    calls: dict[str, Callable[[], object]] = {
        "uneven": lambda: ExpertParallel(group, NUM_EXPERTS + 1, forward),
        "degree": lambda: make(overlap_degree=0),
        "large": lambda: make(overlap_degree=1 << 14),
        "unknown": lambda: make(shadowed_experts=(NUM_EXPERTS,)),
        "order": lambda: make(shadowed_experts=(3, 1)),
        "weights": lambda: make()(zeros(1, 2), zeros(1, 1), zeros(1, 1), zeros(8, 2, 3), zeros(8, 3, 2), "silu"),
    }
    return refusals_of(calls)


def run(folder: Path, rank: int) -> None:
    """Run everything, in the same order as the other ranks; at last rank 0 leaves while the others exchange."""
    groups = join_groups(folder, rank, NUM_RANKS, SIZES)
    found: dict[str, Any] = {case.name: errors(case, groups[case.size]) for case in cases()}
    found["order"] = order(groups[2])
    found["travelled"] = travelled(groups[2])
    found["played"] = [played(groups[size]) for size in SIZES]
    found["refusals"] = refusals(groups[2])
    dist.barrier()
    if rank == 0:
        (folder / "found-0.json").write_text(json.dumps(found))
        os._exit(0)
    try:
        errors(Case(4), groups[4])
    except RuntimeError as error:
        found["left alone"] = str(error)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # the group is broken


def run_gpu(folder: Path, rank: int) -> None:
    """Run what two GPUs run, and count how often a forward pass waits for its device."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=PATIENCE_SECONDS),
    )
    group = ring_group()
    found: dict[str, Any] = {case.name: errors(case, group, str(device)) for case in gpu_cases()}
    grouped = expert_backend("grouped_mm").forward
    mode = ExpertParallel(group, NUM_EXPERTS, grouped, overlap_degree=2, shadowed_experts=(0, 5))
    drawn = problem(Case(2, "grouped_mm", dtype="bfloat16", tokens=(64, 64)))
    mine = drawn.part((64, 64), rank)
    x, weights, *matrices = (each.to(device) for each in drawn.inputs)
    w_in, w_out = (local_experts(each, group) for each in matrices)
    forward = partial(mode, x[mine], drawn.routes[mine].to(device), weights[mine], w_in, w_out, "silu")
    forward()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        forward()
    torch.cuda.set_sync_debug_mode("default")
    found["waits"] = [str(each.message) for each in said if "synchroniz" in str(each.message)]
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    on_cpu = sys.argv[2] == "cpu"
    sys.exit(fork_ranks(partial(run if on_cpu else run_gpu, Path(sys.argv[1])), NUM_RANKS if on_cpu else 2))
