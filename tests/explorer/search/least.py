"""The least memory that a request can need."""

from __future__ import annotations

from bexp.explorer.cost.step import required_bytes
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.relaxations import _least_memory


def smallest_requirement(request: ExplorationRequest, report: DeviceReport, model: ExploredModel) -> int:
    """Return the bytes that the smallest candidate of a request is predicted to need, with context and margin.

    Raises EmptySpaceError if the request admits no candidate on this device.
    """
    return required_bytes(_least_memory(request, report, model).peak, report.hardware, request.allocator)
