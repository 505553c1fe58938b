"""Builds our expert kernels for a benchmark's shapes, in several processes at once, before it times them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable

import torch

from bexp.child_process import module_command
from bexp.kernels.builds import Experts, Order
from bexp.kernels.shapes import ExpertsShape
from bexp.measure.host_limits import usable_cores

MOST_SECONDS = 150.0
"""What is not built then is built when it first runs."""


def build(needed: Iterable[tuple[ExpertsShape, int, bool]], device: str) -> None:
    """Build the kernels into Triton's cache, for a CUDA device.

    Each that is `needed` has a number of tokens, and says whether matrices are transposes of contiguous tensors.
    """
    if torch.device(device).type != "cuda":
        return
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    experts = tuple(Experts(shape, (tokens,), transposed) for shape, tokens, transposed in dict.fromkeys(needed))
    order = Order(experts, capability, properties.multi_processor_count, max(1, usable_cores() - 1))
    command, environment = module_command("bexp.kernels.builds"), {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        subprocess.run(command, input=order.encode().encode(), env=environment, timeout=MOST_SECONDS, check=True)
    except subprocess.SubprocessError as error:
        print(f"not all expert kernels were built beforehand: {error}", flush=True)
