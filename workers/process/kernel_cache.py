"""The folder of compiled kernels, which outlives processes and jobs: where it is, and how large it may grow."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from bexp.private_files import make_private_folder

FOLDER_VARIABLE = "BEXP_KERNEL_CACHE"
LIBRARY_FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""The variable with a library's folder, and the name of that folder."""
MOST_BYTES = 8 << 30
"""A cache that is larger is made smaller, the oldest entries first."""
KEPT_SECONDS = 24 * 3600.0
"""Entries that are younger stay, because a process that runs may read them."""

_log = logging.getLogger(__name__)


def kernel_cache(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with each library's folder; empty if no folder can be used.

    The folder is BEXP_KERNEL_CACHE, else `bexp/kernels` in XDG_CACHE_HOME or in ~/.cache, else one in the temporary
    directory. A missing folder is made. A folder that nobody has named is used only if no other user can write to it,
    because its contents are run.
    """
    named = environment.get(FOLDER_VARIABLE)
    if named and not _is_writable(Path(named)):
        _log.warning("%s=%s cannot be written; kernels are kept elsewhere", FOLDER_VARIABLE, named)
        named = None
    folder = Path(named).absolute() if named else next(filter(_is_private, _usual_folders(environment)), None)
    return {} if folder is None else {variable: str(folder / name) for variable, name in LIBRARY_FOLDERS.items()}


def _usual_folders(environment: Mapping[str, str]) -> Iterator[Path]:
    cache, home = environment.get("XDG_CACHE_HOME", ""), environment.get("HOME", "")
    if cache.startswith("/"):
        yield Path(cache) / "bexp" / "kernels"
    elif home.startswith("/"):
        yield Path(home) / ".cache" / "bexp" / "kernels"
    yield Path(tempfile.gettempdir()) / f"bexp-kernels-{os.getuid()}"


def _is_writable(folder: Path) -> bool:
    """Return whether this process can write to a folder, which is made if it is missing."""
    try:
        make_private_folder(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _is_private(folder: Path) -> bool:
    """Return whether this user alone can write to a folder, which is made if it is missing."""
    if not _is_writable(folder):
        return False
    status = folder.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & others


def shrink_cache(given: Mapping[str, str], most_bytes: int = MOST_BYTES) -> int:
    """Delete the oldest compiled kernels until all together have at most `most_bytes`; return how many.

    A library compiles missing kernels again. A folder that the user's environment, `given`, names for a library stays
    as it is. An entry is the files of one folder, so that no kernel loses a part of itself.
    """
    folders = [Path(path) for name, path in kernel_cache(given).items() if name not in given]
    entries = sorted(entry for folder in folders for entry in _entries(folder))
    total, number, now = sum(size for _, size, _ in entries), 0, time.time()
    for changed, size, folder in entries:
        if total <= most_bytes or now - changed < KEPT_SECONDS:
            break
        with contextlib.suppress(OSError):  # another process may use the folder
            for file in [each for each in folder.iterdir() if not each.is_dir()]:
                file.unlink()
            folder.rmdir()
        total -= size
        number += 1
    return number


def _entries(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield when each folder with files was changed last, the bytes of its files, and the folder."""
    for place, _, names in os.walk(folder):
        found = []
        for name in names:
            with contextlib.suppress(OSError):  # another process may replace it
                found.append((Path(place) / name).stat())
        if found:
            yield max(one.st_mtime for one in found), sum(one.st_size for one in found), Path(place)
