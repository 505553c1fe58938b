"""Finds out whether torch.compile can work here."""

from __future__ import annotations

import shutil

COMPILERS = {"cpu": ("g++", "c++", "clang++"), "cuda": ("cc", "gcc", "clang")}


def missing_compiler(device_type: str) -> str | None:
    """Return why torch.compile cannot work; None if it can. Inductor compiles C++ on the CPU, and Triton C for CUDA."""
    names = COMPILERS[device_type]
    if any(shutil.which(name) for name in names):
        return None
    return f"torch.compile needs a C compiler, and none of {', '.join(names)} is on the PATH"
