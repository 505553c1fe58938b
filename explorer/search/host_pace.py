"""Who sets the pace of the recommended candidate: the device, or the host that it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from bexp.explorer.model.amounts import rate_text, seconds_text

if TYPE_CHECKING:
    from bexp.explorer.search.posterior import Posterior

BUSY = 0.9
"""From this share of the time on in which the device runs kernels, it sets the pace."""


def describe_host_pace(posterior: Posterior, row: int) -> Iterator[str]:
    """Yield that the host sets the pace of a candidate, with what shows it, if it does.

    For a training command the samples of its driver show it, otherwise the seconds in which a micro-step is issued.
    """
    if posterior.hardware.device_kind == "cpu":
        return
    yield from _of_command(posterior, row) if posterior.is_whole else _of_blocks(posterior, row)


def _of_command(posterior: Posterior, row: int) -> Iterator[str]:
    runs = [run for run in posterior.runs_of(row) if run.busy_share is not None]
    shares = [run.busy_share for run in runs if run.busy_share is not None]
    if not shares or (share := float(np.median(shares))) >= BUSY:
        return
    text = f"the host sets the pace: the device ran kernels in {share:.0%} of the time"
    spans = [run.span_seconds for run in runs if run.span_seconds is not None]
    if spans:
        whole = posterior.corrected_seconds(row)
        unit, product = posterior.table.model.rate_unit, whole.tokens_per_second * whole.micro_step
        slowest, fastest = max(longest for _, longest in spans), min(shortest for shortest, _ in spans)
        lowest, _, _ = rate_text(product / slowest, unit).partition(" ")
        text += f", and single seconds of the trials had {lowest} to {rate_text(product / fastest, unit)}"
    yield f"{text}. Other work on the host changes the speed of a run"


def _of_blocks(posterior: Posterior, row: int) -> Iterator[str]:
    rows, surrogate = np.array([row]), posterior.surrogate
    device_1K, host_1K = surrogate.device_mean_K[None], surrogate.host_K[None]
    runs, paced = (
        float(posterior.table.micro_step_seconds(device_1K, host, rows)[0, 0]) for host in (0.0 * host_1K, host_1K)
    )
    if runs < BUSY * paced:
        yield (
            f"the host sets the pace: it issues a micro-step in {seconds_text(paced)}, which the device runs in "
            f"{seconds_text(runs)}. Other work on the host, and what a trainer does beside the model, add to that"
        )
