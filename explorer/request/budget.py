"""When a search ends."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bexp.explorer.model.base import Frozen

WEIGHING_BATCH_SIZE = 512
"""The effective batch that weighs the optimizer where nobody states one."""

Count = Annotated[int, Field(ge=1, le=1 << 20)]


class Budget(Frozen):
    """When the search ends: at the confidence target, or when a limit is reached.

    `max_seconds` limits the time of all trials together, earlier leases' trials included. A trial counts from when it
    begins until its result is taken in, with the time to choose it and to learn from it. This is no limit of elapsed
    time: beginning a job, enumerating the space and storing come on top, and a trial that has begun is not cut short.
    Several trials in flight each count in full, so n of them use the seconds up about n times as fast. Each variant has
    an equal share of both limits, and what earlier variants left over.

    The base is measured in any case. Twice the limits hold until there is a candidate to recommend, and for what the
    answer is compared with. Whole models of recommended candidates come on top, until one has run well; then whole
    models have a third of the seconds. If noise between runs keeps the confidence below its target whatever is measured
    again, the search has an eighth of the seconds.
    """

    confidence_target: Annotated[int, Field(ge=1, le=99)] = 95
    max_trials: Annotated[int, Field(ge=1, le=2000)] = 200
    max_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    trial_timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 120.0
