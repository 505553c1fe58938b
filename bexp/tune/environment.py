"""The environment of a training command: that of a person, with the hook, on the device that they have named."""

from __future__ import annotations

import os
from collections.abc import Mapping

from bexp.child_process import PACKAGES_FOLDER
from bexp.tune.link import SITE

HOOK = PACKAGES_FOLDER / "bexp" / "tune" / "hook"


def with_hook(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which each Python process loads the hook."""
    own = environment.get("PYTHONPATH")
    path = os.pathsep.join([str(HOOK), *([own] if own else [])])
    return {**environment, "PYTHONPATH": path, SITE: str(PACKAGES_FOLDER)}


def on_device(environment: Mapping[str, str], device: str) -> dict[str, str]:
    """Return an environment that shows one device, `cpu` or `cuda:1`, of those that were visible."""
    if device == "cpu":
        return {**environment, "CUDA_VISIBLE_DEVICES": ""}
    number = int(device.partition(":")[2] or 0)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return {**environment, "CUDA_VISIBLE_DEVICES": visible.split(",")[number].strip() if visible else str(number)}
