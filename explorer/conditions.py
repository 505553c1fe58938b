"""The state of a device while something was timed on it, and whether such a timing can be trusted."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from explorer.frozen import Frozen

GIB = 2**30
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
"""Clock reasons of a device that is not itself: too hot, or told by the board to slow down.

The software power cap is none of them: a large GPU under load runs at it all the time, in training as well.
"""
FOREIGN_BUSY_SHARE = 0.05
"""Of a device's time: what another process may use before a timing is no longer one's own."""

Share = Annotated[float, Field(ge=0, le=1)]


class Conditions(Frozen):
    """What was read off a device during the timed repeats; null is what it does not tell.

    `sm_clock_mhz` and `memory_clock_mhz` are medians, `sm_clock_min_mhz` the lowest, `sm_clock_max_mhz` the highest
    that the device has; `power_watts` is a median, `temperature_celsius` the highest. `clock_reasons` are NVML's
    reasons for the clocks, all that occurred. `foreign_processes` and `foreign_bytes` are other processes, and
    memory of others, that appeared since the job began; `foreign_busy_share` is the device time, `host_busy_share` the
    CPU time of the host, that others used.

    A wide spread of the repeats is no part of it: the standard error says so, and the search weighs a timing by it.
    """

    sm_clock_mhz: float | None = None
    sm_clock_min_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    clock_reasons: tuple[str, ...] = ()
    foreign_processes: Annotated[int, Field(ge=0)] = 0
    foreign_bytes: Annotated[int, Field(ge=0)] = 0
    foreign_busy_share: Share | None = None
    host_busy_share: Share | None = None

    @property
    def taint(self) -> str | None:
        """Why what was timed says little about the device itself; null if nothing speaks against it.

        A busy host is recorded and taints nothing: on a machine of few cores it is the rule, and repeats show it.
        """
        if self.foreign_processes or self.foreign_bytes or (self.foreign_busy_share or 0.0) >= FOREIGN_BUSY_SHARE:
            others = "another process" if self.foreign_processes <= 1 else f"{self.foreign_processes} other processes"
            held = f", which took {self.foreign_bytes / GIB:.0f} GiB" if self.foreign_bytes >= GIB else ""
            return f"the device is shared with {others}{held}"
        slowdowns = [reason for reason in self.clock_reasons if reason in SLOWDOWNS]
        return f"the device is throttled: {', '.join(slowdowns)}" if slowdowns else None
