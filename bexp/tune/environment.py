"""The environment of a training command: a person's own, with the hook, on the devices that they have named."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence

from bexp.child_process import PACKAGES_FOLDER
from bexp.tune.link import SITE

LONGEST_FOLDER = 55
"""The path of a Unix socket has at most 103 characters. Those of `bexp tune` lie two folders deeper, which take 48."""
HOOK = PACKAGES_FOLDER / "bexp" / "tune" / "hook"


def temporary_folder() -> str:
    """Return the folder for temporary files, or `/tmp` if its path is too long for that of a socket in it."""
    own = tempfile.gettempdir()
    return "/tmp" if len(own) > LONGEST_FOLDER else own  # noqa: S108 - what is made in it is for this user alone


def with_hook(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which each Python process loads the hook."""
    own = environment.get("PYTHONPATH")
    path = os.pathsep.join([str(HOOK), *([own] if own else [])])
    return {**environment, "PYTHONPATH": path, SITE: str(PACKAGES_FOLDER)}


def on_devices(environment: Mapping[str, str], devices: Sequence[str]) -> dict[str, str]:
    """Return an environment that shows only these devices, `cpu` or `cuda:1`, of those that were visible."""
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    numbers = [int(device.removeprefix("cuda:")) for device in devices if device != "cpu"]
    shown = [visible[number] if visible else str(number) for number in numbers]
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(shown)}
