"""Files and folders that are made for this user alone, whatever the umask. What is there already keeps its mode."""

from __future__ import annotations

import os
from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing.

    Raises OSError if that cannot be done.
    """
    for each in [*reversed(folder.parents), folder]:  # `parents=True` would leave those above to the umask
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)


def private(path: str | Path, flags: int) -> int:
    """Open a file, which is made if `flags` say so; the `opener` of `open`."""
    return os.open(path, flags, 0o600)
