"""The back end `auto`: a whole expert FFN by the back end that the table names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.dtypes import dtype_name
from bexp.kernels.experts.auto.choice import ByLoad
from bexp.kernels.experts.auto.measuring import FFNShape, measure_ffn
from bexp.kernels.experts.auto.plans import (
    MOST_KEPT,
    GemmPlans,
    is_capturing,
    may_measure,
    settle,
    shape_of,
    table_of,
)
from bexp.kernels.experts.auto.products import STOCK
from bexp.kernels.experts.expert_backend import ExpertBackend, ExpertFFN
from bexp.kernels.experts.grouped_ffn import grouped_ffn
from bexp.kernels.experts.rows import sorted_rows
from bexp.kernels.shapes import ExpertsShape

PLANNED = "planned"
"""The choice of the shared FFN around planned GEMMs, beside the names of back ends."""


@dataclass
class AutoExperts:
    """Chooses among `backends`, which holds torch's own two as well."""

    backends: Mapping[str, ExpertBackend]
    gemms: GemmPlans = field(init=False)
    _chosen: dict[tuple[object, ...], ExpertFFN] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gemms = GemmPlans(self.backends)

    def forward(
        self, x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
    ) -> Tensor:
        """As in `ExpertFFN`."""
        if torch.compiler.is_compiling():
            run = self.backends[self._traced_choice(routes_TK, w_in, w_out)].forward
            return run(x_TD, routes_TK, weights_TK, w_in, w_out, activation)
        key = (routes_TK.shape, w_in.shape, w_in.is_contiguous(), w_out.shape, w_in.dtype, w_in.get_device())
        run = self._chosen.get(key) or self._settled(key, routes_TK, w_in, w_out)
        return run(x_TD, routes_TK, weights_TK, w_in, w_out, activation)

    def choice(self, shape: FFNShape, num_tokens: int, device: torch.device, *, may: bool) -> str:
        """The name of the back end for a number of tokens, or `PLANNED`; it is measured if `may` is set."""

        def measure(num_pairs: int) -> ByLoad:
            return self._measure(shape, max(1, num_pairs // shape.top_k), device)

        return settle(shape.key, num_tokens * shape.top_k, device, measure, may=may)

    def prepare(self, shape: FFNShape, num_tokens: Iterable[int], device: torch.device) -> None:
        """Measure what the table lacks for these numbers of tokens, and for the GEMMs inside.

        It needs memory for a layer of the shape, takes a second or two a class once the kernels are built, and waits
        for the device.
        """
        for tokens in num_tokens:
            self.choice(shape, tokens, device, may=True)

    def check(self, shape: ExpertsShape, device: torch.device) -> str | None:
        """Why there is nothing to choose from; None if there is."""
        reason = self.backends[STOCK].unsupported_reason(shape, device)
        if reason is not None:
            return reason
        others = (each for name, each in self.backends.items() if name != STOCK and not each.waits)
        if any(each.unsupported_reason(shape, device) is None for each in others):
            return None
        return f"auto has nothing to choose from: only {STOCK} serves this shape here without waiting; name it instead"

    def _measure(self, shape: FFNShape, num_tokens: int, device: torch.device) -> ByLoad:
        """Seconds of every back end that serves the shape without a wait, and of planned GEMMs where they differ."""
        like = ExpertsShape(
            hidden_size=shape.hidden_size,
            ffn_hidden_size=shape.ffn_hidden_size,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            dtype=shape.dtype,
            gated=shape.gated,
        )
        able = {name: each for name, each in self.backends.items() if not each.waits}
        forwards = {n: each.forward for n, each in able.items() if each.unsupported_reason(like, device) is None}
        plans = [self.gemms.plan(gemm, num_tokens * shape.top_k, device, may=True) for gemm in shape.gemms()]
        if plans[0] != plans[1] or plans[0] not in forwards:
            forwards[PLANNED] = self._planned
        return measure_ffn(shape, num_tokens, forwards, device) if len(forwards) > 1 else {}

    def _settled(self, key: tuple[object, ...], routes_TK: Tensor, w_in: Tensor, w_out: Tensor) -> ExpertFFN:
        shape = shape_of(routes_TK, w_in, w_out)
        name = self.choice(shape, routes_TK.shape[0], w_in.device, may=may_measure(w_in.device))
        run = self._planned if name == PLANNED else self.backends.get(name, self.backends[STOCK]).forward
        if len(self._chosen) < MOST_KEPT and not is_capturing(w_in.device):
            self._chosen[key] = run
        return run

    def _planned(
        self, x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
    ) -> Tensor:
        rows = sorted_rows(routes_TK, w_in.shape[0], count=False)
        return grouped_ffn(x_TD, weights_TK, w_in, w_out, activation, rows, self.gemms)

    def _traced_choice(self, routes_TK: Tensor, w_in: Tensor, w_out: Tensor) -> str:
        """The choice while a graph is traced, among back ends that can be traced.

        The number of rows is compared with constants only, so that a graph with symbolic shapes serves a whole class.
        """
        shape = shape_of(routes_TK, w_in, w_out)
        num_pairs = routes_TK.shape[0] * routes_TK.shape[1]
        steps = _steps(
            *(shape.num_experts, shape.top_k, shape.hidden_size, shape.ffn_hidden_size, shape.gated),
            *(dtype_name(shape.dtype), shape.transposed, str(w_in.device), self._traceable(shape.dtype)),
        )
        return next((name for end, name in steps if num_pairs < end), STOCK)

    def _traceable(self, dtype: torch.dtype) -> tuple[str, ...]:
        return tuple(name for name, each in self.backends.items() if dtype in each.traceable_dtypes)


def _steps(
    num_experts: int,
    top_k: int,
    hidden_size: int,
    ffn_hidden_size: int,
    gated: bool,
    dtype: str,
    transposed: bool,
    device: str,
    among: tuple[str, ...],
) -> tuple[tuple[int, str], ...]:
    """The names of back ends after the first number of rows that they do not serve, as a constant of a graph."""
    number_format = getattr(torch, dtype)
    shape = FFNShape(num_experts, top_k, hidden_size, ffn_hidden_size, gated, number_format, transposed)
    return table_of(torch.device(device)).steps(shape.key, STOCK, among)


# What `torch.compiler.assume_constant_result` does, without the compiler that it imports, which takes seconds.
_steps._dynamo_marked_constant = True  # type: ignore[attr-defined] # torch reads it


def auto_backend(backends: Iterable[ExpertBackend]) -> tuple[ExpertBackend, AutoExperts]:
    """The back end that chooses among those that a search would try by itself."""
    experts = AutoExperts({each.name: each for each in backends if not each.only_when_named})
    traceable = experts.backends[STOCK].traceable_dtypes
    # A search times every back end at every micro-batch, so `auto` would only be timed again: it must be named.
    return ExpertBackend("auto", False, experts.check, experts.forward, traceable, only_when_named=True), experts
