"""How long an exploration may take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from explorer.frozen import Frozen


class Budget(Frozen):
    """When the search ends: at the confidence target, or when a limit is reached.

    `max_seconds` is of all trials together, earlier leases' included: each counts from when it begins until its result
    is taken in, with what choosing it and learning from it took. That is no limit of elapsed time. What is no trial
    (beginning a job, enumerating the space, storing) comes on top; a trial that has begun is not cut short; and of
    several in flight each counts in full, so that n of them use the seconds up about n times as fast. Variants have
    equal shares of both limits, and what earlier ones left over.

    The base is measured in any case. Until there is a candidate to recommend, and for what the answer is compared
    with, twice the limits hold. Whole models (at most four runs a variant) come on top, but for the runner-up.
    """

    confidence_target: Annotated[int, Field(ge=1, le=99)] = 95
    max_trials: Annotated[int, Field(ge=1, le=2000)] = 200
    max_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    trial_timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 120.0
