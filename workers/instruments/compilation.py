"""Checks whether torch.compile can work here, and its start."""

from __future__ import annotations

import shutil

import torch

COMPILERS = {"cpu": ("g++", "c++", "clang++"), "cuda": ("cc", "gcc", "clang")}


def missing_compiler(device_type: str) -> str | None:
    """Return why torch.compile cannot work; None if it can. Inductor compiles C++ on the CPU, and Triton C for CUDA."""
    names = COMPILERS[device_type]
    if any(shutil.which(name) for name in names):
        return None
    return f"torch.compile needs a C compiler, and none of {', '.join(names)} is on the PATH"


def start_compiler(device: torch.device) -> None:
    """Compile something small, so that the first candidate does not wait for the compiler's own processes to start."""
    if missing_compiler(device.type) is None:
        torch.compile(lambda x: (2.0 * x).relu().sum())(torch.ones(64, device=device, requires_grad=True)).backward()
        torch.compiler.reset()
