"""The report of a profiler on its device before the first trial of a job."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from bexp.explorer.model.base import Frozen
from bexp.explorer.model.hardware import BackendSupport, HardwareSpec
from bexp.explorer.model.parts import ModelParts
from bexp.explorer.records.earlier_runs import EarlierRuns
from bexp.explorer.records.run_report import ReportedRun


class DeviceReport(Frozen):
    """A profiler's description of its device before the first trial of a job.

    `default_attention` is the back end that torch's scaled_dot_product_attention picks by itself. `default_experts` is
    the expert back end of the base candidate: grouped_mm, or the loop if grouped_mm is unavailable.
    """

    hardware: HardwareSpec
    attention_backends: tuple[BackendSupport, ...]
    expert_backends: tuple[BackendSupport, ...] = ()
    choices: Mapping[str, tuple[BackendSupport, ...]] = Field(
        {}, description="The values that this model can have here, by dimension, where the request leaves a choice."
    )
    default_attention: str
    default_experts: str | None = None
    parts: ModelParts | None = Field(
        None, description="The parts of a model whose own code is measured; null for the reference layers."
    )

    refusal: str | None = Field(None, description="Why the target cannot measure this model here.")
    reported_runs: tuple[ReportedRun, ...] = Field(
        (), description="Real runs with this model on such a device that were reported when the exploration began."
    )
    earlier: EarlierRuns = Field(
        EarlierRuns(), description="Components that may be reused, as they were known when the exploration began."
    )

    @classmethod
    def refused(cls, hardware: HardwareSpec, reason: str) -> DeviceReport:
        """Return the report of a target that cannot measure the request's model."""
        return cls(hardware=hardware, attention_backends=(), default_attention="none", refusal=reason)

    def is_stock(self, attention: str, experts: str | None) -> bool:
        """Return whether torch itself has both back ends."""
        stock = {b.name for b in (*self.attention_backends, *self.expert_backends) if b.stock}
        return attention in stock and (experts is None or experts in stock)
