"""Where compiled kernels are kept, so that they are built once for a card and not once for a job or a process.

Without a setting, Triton keeps kernels below the home folder, and torch.compile keeps those it makes, and after its
first use all others too, in a folder of the temporary directory that depends on the number of the device. A container
often has neither for long. Profilers are therefore told one folder for each library, which all cards of a user share:
both libraries name a kernel by a hash of its source, its options, their own version and the card's architecture, and
replace files in one step, so that processes may build and read at once.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

FOLDER_VARIABLE = "BEXP_KERNEL_CACHE"
LIBRARY_FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "BEXP_EXPERT_TABLES": "experts",
}
"""The variable that tells a library its folder, and the name of that folder. Ours holds what `auto` has measured."""

_log = logging.getLogger(__name__)


def kernel_cache(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell each library its folder; empty if no folder can be used.

    The folder is BEXP_KERNEL_CACHE, else `bexp/kernels` in XDG_CACHE_HOME or in ~/.cache, else one in the temporary
    directory. It is made if it is missing. A folder that nobody has named is used only if no other user can write to
    it, because what it holds is run.
    """
    named = environment.get(FOLDER_VARIABLE)
    if named and not _is_writable(Path(named)):
        _log.warning("%s=%s cannot be written; kernels are kept elsewhere", FOLDER_VARIABLE, named)
        named = None
    found = Path(named).absolute() if named else next(filter(_is_private, _usual_folders(environment)), None)
    return {} if found is None else {variable: str(found / name) for variable, name in LIBRARY_FOLDERS.items()}


def _usual_folders(environment: Mapping[str, str]) -> Iterator[Path]:
    cache, home = environment.get("XDG_CACHE_HOME", ""), environment.get("HOME", "")
    if cache.startswith("/"):
        yield Path(cache) / "bexp" / "kernels"
    elif home.startswith("/"):
        yield Path(home) / ".cache" / "bexp" / "kernels"
    yield Path(tempfile.gettempdir()) / f"bexp-kernels-{os.getuid()}"


def _is_writable(folder: Path) -> bool:
    """Whether this process can write to a folder, which is made if it is missing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _is_private(folder: Path) -> bool:
    """Whether this user alone can write to a folder, which is made if it is missing."""
    if not _is_writable(folder):
        return False
    found = folder.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & others
