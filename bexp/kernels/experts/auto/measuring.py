"""Measures plans on this device: every plan under even and under skewed loads, in turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bexp.kernels.experts.auto.choice import ByLoad, Seconds, Times, choose
from bexp.kernels.experts.auto.products import PRODUCTS, STOCK, gemm_of, mixed, product_runs
from bexp.kernels.experts.expert_backend import ExpertFFN
from bexp.kernels.experts.rows import Rows
from bexp.measure.turns import Run, TurnsBudget, chained, time_in_turns

LOADS = ("uniform", "zipf")
PLANS = TurnsBudget(rounds=11, chain_seconds=3e-3, most_repeats=20, most_seconds=0.4)
PRODUCTS_ALONE = TurnsBudget(rounds=3, chain_seconds=1e-3, most_repeats=20)
"""How long plans are timed, which the choice is made by, and single products, which only say what to mix."""

T = TypeVar("T")


class Timer(Protocol):
    """Times functions in turns."""

    def __call__(self, runs: Mapping[str, Run], device: torch.device, budget: TurnsBudget, /) -> Mapping[str, Times]:
        """Return the times of a run, by name."""


def time_runs(runs: Mapping[str, Run], device: torch.device, budget: TurnsBudget, /) -> dict[str, Times]:
    """The timer of a real device."""
    return {
        name: Times(Seconds(t.clock_seconds, t.clock_error_seconds), Seconds(t.device_seconds, t.device_error_seconds))
        for name, t in time_in_turns(runs, device, budget).items()
    }


@dataclass(frozen=True, slots=True)
class GemmShape:
    """A grouped GEMM but for its rows; `transposed` if the matrices are stored as (E, N, K).

    `even` if the host knows that every expert has as many rows.
    """

    num_experts: int
    k: int
    n: int
    dtype: torch.dtype
    transposed: bool = False
    even: bool = False

    @property
    def key(self) -> str:
        """The name in a table."""
        words = f"{' transposed' if self.transposed else ''}{' even' if self.even else ''}"
        return f"gemm {self.num_experts} x {self.k} x {self.n} {_name(self.dtype)}{words}"

    @property
    def loads(self) -> tuple[str, ...]:
        """The loads that it is measured under."""
        return LOADS[:1] if self.even else LOADS


@dataclass(frozen=True, slots=True)
class FFNShape:
    """An expert FFN but for its tokens; `transposed` if the matrices are stored as (E, 2H, D) and (E, D, H)."""

    num_experts: int
    top_k: int
    hidden_size: int
    ffn_hidden_size: int
    gated: bool
    dtype: torch.dtype
    transposed: bool = False

    @property
    def key(self) -> str:
        """The name in a table, whose rows are token-expert pairs."""
        words = f"{' gated' if self.gated else ''}{' transposed' if self.transposed else ''}"
        sizes = f"{self.num_experts} top {self.top_k} {self.hidden_size} x {self.ffn_hidden_size}"
        return f"ffn {sizes} {_name(self.dtype)}{words}"

    def gemms(self) -> tuple[GemmShape, GemmShape]:
        """The two GEMMs inside."""
        width = self.ffn_hidden_size * (2 if self.gated else 1)
        experts, dtype, transposed = self.num_experts, self.dtype, self.transposed
        return (
            GemmShape(experts, self.hidden_size, width, dtype, transposed),
            GemmShape(experts, self.ffn_hidden_size, self.hidden_size, dtype, transposed),
        )


def shares(load: str, num_experts: int) -> Tensor:
    """Each expert's share of the rows, in float64: equal ones, or Zipf's with exponent 1."""
    weights = 1 / torch.arange(1, num_experts + 1, dtype=torch.float64)
    weights = torch.ones_like(weights) if load == "uniform" else weights
    return weights / weights.sum()


def measure_gemm(
    shape: GemmShape, num_rows: int, names: list[str], device: torch.device, timer: Timer = time_runs
) -> ByLoad:
    """The times of a forward and backward, by load and plan: of each back end, and of the best mix.

    The mix takes each product from the back end that `choose` names by the products' own time on the device. Even rows
    are the multiple of the number of experts that is nearest to `num_rows`.
    """
    if shape.even:
        num_rows = shape.num_experts * max(1, round(num_rows / shape.num_experts))
    w = _matrices(shape.num_experts, shape.k, shape.n, shape.dtype, shape.transposed, device)
    x, grad = (_random(num_rows, columns, shape.dtype, device) for columns in (shape.k, shape.n))
    ends = {load: _ends(load, shape.num_experts, num_rows, device) for load in shape.loads}
    by_product: dict[str, dict[str, dict[str, Times]]] = {product: {} for product in PRODUCTS}
    for load in shape.loads if len(names) > 1 else ():
        for product, runs in product_runs(x, w, grad, ends[load], names).items():
            timed = timer(runs, device, PRODUCTS_ALONE)
            by_product[product][load] = {name: Times(each.device, each.device) for name, each in timed.items()}
    mix = mixed(*(choose(by_product[product], STOCK) for product in PRODUCTS)) if len(names) > 1 else names[0]
    found: dict[str, dict[str, Times]] = {}
    for load in shape.loads:
        rows = Rows(ends[load], ends[load], ends[load])
        runs, links = {}, 1
        for plan in dict.fromkeys((*names, mix)):
            gemm = gemm_of(plan)
            assert gemm is not None, "plans are made of back ends that are here"
            runs[plan], links = chained(_bound(gemm, rows), (x, w), grad)
        found[load] = _per_call(timer(runs, device, PLANS), links)
    return found


def measure_ffn(
    shape: FFNShape,
    num_tokens: int,
    backends: Mapping[str, ExpertFFN],
    device: torch.device,
    timer: Timer = time_runs,
) -> ByLoad:
    """The times of a forward and backward of the whole FFN, by load and back end."""
    width = shape.ffn_hidden_size * (2 if shape.gated else 1)
    w_in = _matrices(shape.num_experts, shape.hidden_size, width, shape.dtype, shape.transposed, device)
    w_out = _matrices(
        shape.num_experts, shape.ffn_hidden_size, shape.hidden_size, shape.dtype, shape.transposed, device
    )
    x, grad = (_random(num_tokens, shape.hidden_size, shape.dtype, device) for _ in range(2))
    weights = _random(num_tokens, shape.top_k, torch.float32, device).softmax(dim=-1).to(shape.dtype)
    found = {}
    for load in LOADS:
        routes = _routes(load, shape, num_tokens, device)
        runs, links = {}, 1
        for name, forward in backends.items():
            runs[name], links = chained(_routed(forward, routes), (x, weights, w_in, w_out), grad)
        found[load] = _per_call(timer(runs, device, PLANS), links)
    return found


def apart(measure: Callable[[], T], device: torch.device) -> T:
    """Return `measure()`, run in a thread of its own, which has neither autocast nor hooks nor a graph of the caller.

    An exception in it is raised here. The caller's random numbers stay as they are.
    """
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with _current(device), _random_numbers_kept(device), torch.enable_grad():
                found.append(measure())
        except BaseException as error:  # noqa: BLE001 - it is raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="bexp-measure-experts")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        yield
        torch.cuda.synchronize(device)


def _random_numbers_kept(device: torch.device) -> AbstractContextManager[None]:
    """Draws from the generators of the host and the device, such as those of a back end's own check, are undone."""
    return torch.random.fork_rng([] if device.type != "cuda" else [_index(device)])


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _per_call(timed: Mapping[str, Times], links: int) -> dict[str, Times]:
    def share(seconds: Seconds) -> Seconds:
        return Seconds(seconds.median / links, seconds.error / links)

    return {name: Times(share(each.clock), share(each.device)) for name, each in timed.items()}


def _bound(gemm: Any, rows: Rows) -> Callable[..., Tensor]:
    return lambda x, w: gemm(x, w, rows)


def _routed(forward: ExpertFFN, routes: Tensor) -> Callable[..., Tensor]:
    return lambda x, weights, w_in, w_out: forward(x, routes, weights, w_in, w_out, "silu")


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, dtype=dtype, device=device, generator=_generator(device))


def _matrices(num_experts: int, k: int, n: int, dtype: torch.dtype, transposed: bool, device: torch.device) -> Tensor:
    size = (num_experts, n, k) if transposed else (num_experts, k, n)
    w = torch.randn(size, dtype=dtype, device=device, generator=_generator(device)).mul_(k**-0.5)
    return w.mT if transposed else w


def _ends(load: str, num_experts: int, num_rows: int, device: torch.device) -> Tensor:
    """The experts' last rows plus one, (E,) int32; Zipf's experts in a fixed, mixed order."""
    share = shares(load, num_experts)
    share = share[torch.randperm(num_experts, generator=torch.Generator().manual_seed(0))]
    ends = (share.cumsum(0) * num_rows).round().to(torch.int32)
    ends[-1] = num_rows
    return ends.to(device)


def _routes(load: str, shape: FFNShape, num_tokens: int, device: torch.device) -> Tensor:
    """Distinct experts of each token, (T, top_k) int64, drawn by Gumbel-top-k."""
    share = shares(load, shape.num_experts).to(device, torch.float32)
    noise = torch.rand(num_tokens, shape.num_experts, device=device, generator=_generator(device)).clamp_(
        1e-9, 1 - 1e-7
    )
    return (share.log() - (-noise.log()).log()).topk(shape.top_k, dim=-1).indices


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
