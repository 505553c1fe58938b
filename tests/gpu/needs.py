"""Which GPUs a test needs."""

from __future__ import annotations

import os

import pytest
import torch

from bexp.workers.devices.discovery import visible_devices


def one_gpu() -> list[pytest.MarkDecorator]:
    """A GPU that this process opens."""
    return [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def visible(number: int) -> list[pytest.MarkDecorator]:
    """So many GPUs, which other processes open, and this one must not."""
    is_missing = f"cuda:{number - 1}" not in visible_devices(os.environ)
    needs = [pytest.mark.gpu, pytest.mark.skipif(is_missing, reason=f"needs {number} CUDA devices")]
    return [*needs, pytest.mark.several_gpus if number > 1 else pytest.mark.alone]
