"""The budget of a search: when it ends."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bexp.explorer.model.base import Frozen

WEIGHING_BATCH_SIZE = 512
"""The effective batch that weighs the optimizer where nobody states one."""

Count = Annotated[int, Field(ge=1, le=1 << 20)]


class Budget(Frozen):
    """The end of a search: at the confidence target, or when a limit is reached.

    The base is measured in any case. Twice the limits hold until there is a candidate to recommend, and for the
    comparisons of the answer. Whole models of recommended candidates come on top, until one has run well.
    """

    confidence_target: Annotated[int, Field(ge=1, le=99)] = 95
    max_trials: Annotated[int, Field(ge=1, le=2000)] = 200
    """Each variant has an equal share of both limits, and what earlier variants left over."""
    max_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """The time of all trials together, those of earlier leases included.

    A trial counts from its choice until its result is learnt. Trials in flight at once each count in full. Starting a
    job, enumerating the space and storing results come on top, and a running trial is not cut short. After a whole
    model that ran well, whole models have a third of it. A search that noise keeps from its confidence has an eighth.
    """
    trial_timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 120.0
