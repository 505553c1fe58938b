"""What a measurement within a training leaves as it was."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def left_alone(
    parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor], devices: Iterable[torch.device]
) -> Iterator[None]:
    """Save gradients, buffers (such as running means) and random states, and restore them at the end.

    The random states are those of the CPU, of Python, of NumPy, and of the CUDA `devices`.
    """
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    kept = [(buffer, buffer.detach().clone()) for buffer in buffers]
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    on_devices = [(device, torch.cuda.get_rng_state(device)) for device in devices]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        for device, state in on_devices:
            torch.cuda.set_rng_state(state, device)
