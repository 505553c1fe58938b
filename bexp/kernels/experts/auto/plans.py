"""The plans that this process uses: from the table of its device, or measured at the first use of a class."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bexp.kernels.experts.auto.choice import ByLoad
from bexp.kernels.experts.auto.measuring import FFNShape, GemmShape, apart, measure_gemm
from bexp.kernels.experts.auto.products import EVEN, KERNELS, STOCK, gemm_of
from bexp.kernels.experts.auto.table import MEASURE_VARIABLE, KernelTable, row_class, rows_of_class
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.grouped_ffn import GroupedGemm
from bexp.kernels.experts.rows import Rows
from bexp.kernels.shapes import ExpertsShape

NO_GRAPH_TASK = -1
"""What autograd returns as the number of the backward that this thread is in, if it is in none."""
MOST_KEPT = 1 << 12
"""A process keeps the plans of this many shapes; later ones are looked up in the table each time."""

_log = logging.getLogger(__name__)


def may_measure(device: torch.device) -> bool:
    """Whether this process may measure a class at its first use, and nothing is being captured or traced.

    Nothing is measured from within a backward: that of the measurement would wait for the same thread of autograd.
    """
    if os.environ.get(MEASURE_VARIABLE) != "1" or torch.compiler.is_compiling():
        return False
    if torch._C._current_graph_task_id() != NO_GRAPH_TASK:
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def table_of(device: torch.device) -> KernelTable:
    """The table of a device's card, read once a process. `cuda` without a number is the current device."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return read_table(device)


@functools.cache
def read_table(device: torch.device) -> KernelTable:
    """As `table_of`, for a device with its number: each device has one table, by whatever name it is asked for."""
    return KernelTable.of_device(device)


def settle(key: str, num_rows: int, device: torch.device, measure: Callable[[int], ByLoad], *, may: bool) -> str:
    """Return the plan of a shape for a number of rows. If `may` is set, an unknown class is measured first."""
    table, number = table_of(device), row_class(num_rows)
    if may and not table.has(key, number):
        try:
            seconds = apart(lambda: measure(rows_of_class(number)), device)
        except Exception as error:  # noqa: BLE001 - whatever a back end raises, memory that ran out included
            reason = str(error).strip().partition("\n")[0]
            _log.warning("%s with %d rows is not measured: %s", key, num_rows, reason)
        else:
            table.write(key, number, seconds)
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return table.plan(key, num_rows, STOCK)


@dataclass
class GemmPlans:
    """The grouped GEMM of each shape that this process has met. `backends` say which of the kernels can serve it."""

    backends: Mapping[str, ExpertBackend]
    _gemms: dict[tuple[object, ...], GroupedGemm] = field(default_factory=dict)

    def __call__(self, x_RK: Tensor, w_EKN: Tensor, rows: Rows) -> Tensor:
        """As in `GroupedGemm`: the plan for these shapes."""
        # Every microsecond here is one of the host's in each product of a small model.
        even = rows.are_even if rows.counts else False
        key = (x_RK.shape, w_EKN.shape, w_EKN.is_contiguous(), x_RK.dtype, x_RK.get_device(), even)
        gemm = self._gemms.get(key) or self._settled(key, x_RK, w_EKN, even)
        return gemm(x_RK, w_EKN, rows)

    def plan(self, shape: GemmShape, num_rows: int, device: torch.device, *, may: bool) -> str:
        """The plan of a GEMM; it is measured if `may` is set, which may wait for the device.

        Even rows that are not measured, or could not be, take the plan of any rows.
        """
        plan = settle(shape.key, num_rows, device, functools.partial(self._measure, shape, device=device), may=may)
        if shape.even and not table_of(device).is_near(shape.key, num_rows):
            return self.plan(replace(shape, even=False), num_rows, device, may=may)
        return plan

    def _measure(self, shape: GemmShape, num_rows: int, *, device: torch.device) -> ByLoad:
        like = ExpertsShape(shape.k, shape.n, shape.num_experts, 1, shape.dtype, gated=False)
        able = (name for name in KERNELS if name in self.backends and (shape.even or name != EVEN))
        names = [name for name in able if self.backends[name].unsupported_reason(like, device) is None]
        return measure_gemm(shape, num_rows, names, device) if len(names) > 1 else {}

    def _settled(self, key: tuple[object, ...], x_RK: Tensor, w_EKN: Tensor, even: bool) -> GroupedGemm:
        (num_experts, k, n), device = w_EKN.shape, x_RK.device
        shape = GemmShape(num_experts, k, n, x_RK.dtype, not w_EKN.is_contiguous(), even)
        gemm = gemm_of(self.plan(shape, x_RK.shape[0], device, may=may_measure(device))) or KERNELS[STOCK].gemm
        if len(self._gemms) < MOST_KEPT and not is_capturing(device):
            self._gemms[key] = gemm
        return gemm


def is_capturing(device: torch.device) -> bool:
    """Whether launches on the current stream go into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def shape_of(routes_TK: Tensor, w_in: Tensor, w_out: Tensor) -> FFNShape:
    """The shape of an expert FFN's arguments."""
    num_experts, width, hidden_size = w_out.shape
    gated = w_in.shape[2] == 2 * width
    return FFNShape(num_experts, routes_TK.shape[1], hidden_size, width, gated, w_in.dtype, not w_in.is_contiguous())
