"""The process that holds the lock of a file, as the kernel names it, so that no user can forge another's name."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bexp.explorer.model.spelling import shortened

MOST_SHOWN = 120
"""Characters that are shown of a command line."""

_PASSWORD = re.compile(r"(?<=://)[^/\s]*@")
"""The password in the URL of a database, which may stand in a command line."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock, and what is known of it: `process 7 of user ann, started ...: python ...`."""

    pid: int
    text: str


def find_holder(descriptor: int) -> Holder | None:
    """Return who holds an flock on an open file.

    The kernel names the process that took the lock. That process may have passed the lock on, so its present owner is
    looked for. Returns None if nobody holds it, or if a container hides who does.
    """
    try:
        file = _kernel_name(descriptor)
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except (OSError, LookupError):  # there is no /proc here
        return None
    taker = next((int(fields[4]) for fields in locks if fields[1] == "FLOCK" and fields[5] == file), 0)
    if taker <= 0:  # 0: it is in another namespace
        return None
    lives = _lives(taker)
    if lives and _has_lock(taker, file) is not False:
        return Holder(taker, _describe(taker))
    given = f"was given the lock by process {taker}{'' if lives else ', which has ended'}"
    for heir in psutil.pids():
        if _has_lock(heir, file):
            return Holder(heir, f"{_describe(heir)}; it {given}")
    return Holder(taker, f"a process that {given}")


def _kernel_name(descriptor: int) -> str:
    """Return a file as /proc/locks names it. Btrfs and overlays show stat(2) another device than the kernel's own."""
    info = dict(line.split(maxsplit=1) for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines())
    mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    devices = {fields[0]: fields[2] for fields in mounts}
    major, minor = map(int, devices[info["mnt_id:"].strip()].split(":"))
    return f"{major:02x}:{minor:02x}:{info.get('ino:', os.fstat(descriptor).st_ino)}"


def _lives(pid: int) -> bool:
    """Return whether a process has not ended, also if the system hides it from other users."""
    with suppress(PermissionError):  # it is another user's
        try:
            os.kill(pid, 0)
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False
    return True


def _has_lock(pid: int, file: str) -> bool | None:
    """Return whether a process has a lock by a descriptor of its own; None if this user may not look."""
    try:
        entries = list(Path(f"/proc/{pid}/fdinfo").iterdir())
    except OSError:
        return None
    for entry in entries:
        with suppress(OSError):  # it was closed
            if f" {file} " in entry.read_text():
                return True
    return False


def _describe(pid: int) -> str:
    text = f"process {pid}"
    with suppress(psutil.Error, OSError):  # it has just ended, or may not be looked at
        process = psutil.Process(pid)
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(process.create_time()))
        text += f" of user {process.username()}, started {started}"
        command = shortened(_PASSWORD.sub("***@", " ".join(process.cmdline())), MOST_SHOWN)
        text += f": {''.join(filter(str.isprintable, command))}"  # another user chose it
    return text
