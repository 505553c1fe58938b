"""The measured seconds of one machine: a JSON file that many processes read and write.

A file holds what one card on one host reached with one set of versions; its name is a hash of these. Writers take a
lock, read what is there, add to it, and replace the file in one step, so that a reader sees the old or the new file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import platform
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bexp.kernels.experts.auto.choice import ByLoad, Seconds, Times, choose
from bexp.kernels.experts.auto.digest import kernels_digest
from bexp.private_files import make_private_folder, private

FOLDER_VARIABLE = "BEXP_EXPERT_TABLES"
MEASURE_VARIABLE = "BEXP_MEASURE_EXPERTS"
CLASSES_AN_OCTAVE = 2
FARTHEST_CLASSES = 4
"""A class further away than this from all that were measured takes torch's own back end."""
FORMAT = "2"
"""A file of another format is another file."""
MOST_CLASSES = 63 * CLASSES_AN_OCTAVE
"""The class of the most rows that a tensor can have."""


_log = logging.getLogger(__name__)


def row_class(num_rows: int) -> int:
    """Return the class of a number of rows: its base-two logarithm in halves, rounded; 0 rows are in class 0."""
    return round(CLASSES_AN_OCTAVE * math.log2(num_rows)) if num_rows > 1 else 0


def rows_of_class(number: int) -> int:
    """Return the number of rows at which a class is measured."""
    return max(1, round(2 ** (number / CLASSES_AN_OCTAVE)))


def folder() -> Path:
    """Return where tables are kept: BEXP_EXPERT_TABLES, else beside the compiled kernels.

    That is the user's cache folder, or one in the temporary directory if a worker had to go there.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    usual = list(_usual_folders())
    return next(filter(_is_own, usual), usual[0])


def _usual_folders() -> Iterator[Path]:
    """Where a worker keeps tables, in its order of preference."""
    cache, home = os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("HOME", "")
    if cache.startswith("/"):
        yield Path(cache) / "bexp" / "kernels" / "experts"
    elif home.startswith("/"):
        yield Path(home) / ".cache" / "bexp" / "kernels" / "experts"
    yield Path(tempfile.gettempdir()) / f"bexp-kernels-{os.getuid()}" / "experts"


def _is_own(path: Path) -> bool:
    """Whether there is such a folder, and it is this user's."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def machine(device: torch.device) -> dict[str, str]:
    """Return what a table is of. The driver is not in it."""
    return {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "host": _host_processor(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "kernels": kernels_digest(),
        "format": FORMAT,
    }


@dataclass
class KernelTable:
    """Times by shape and class of rows, in memory and in `path`."""

    path: Path
    of: Mapping[str, str]
    _seconds: dict[str, dict[int, dict[str, dict[str, Times]]]] = field(default_factory=dict)

    @classmethod
    def of_device(cls, device: torch.device) -> KernelTable:
        """The table of this machine, with what its file holds."""
        of = machine(device)
        name = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]
        table = cls(folder() / f"{name}.json", of)
        table.read()
        return table

    def read(self) -> None:
        """Add what the file holds. A file that is missing, broken or of another machine holds nothing."""
        try:
            found = json.loads(self.path.read_text())
            if found["of"] != dict(self.of):
                return
            read = {
                shape: {_class_of(number): _decoded(loads) for number, loads in classes.items()}
                for shape, classes in found["seconds"].items()
            }
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("%s is not read: %s", self.path, error)
            return
        for shape, classes in read.items():
            self._seconds.setdefault(shape, {}).update(classes)

    def write(self, shape: str, number: int, seconds: ByLoad) -> None:
        """Keep the seconds of a class, here and in the file. A folder that cannot be written costs only the file."""
        mine = {load: dict(times) for load, times in seconds.items()}
        try:
            make_private_folder(self.path.parent)
            with open(self.path.with_suffix(".lock"), "w", opener=private) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self.read()
                self._seconds.setdefault(shape, {})[number] = mine
                self._replace()
        except OSError as error:
            _log.warning("%s is not written: %s", self.path, error)
            self._seconds.setdefault(shape, {})[number] = mine

    def has(self, shape: str, number: int) -> bool:
        """Whether a class was measured."""
        return number in self._seconds.get(shape, {})

    def seconds(self, shape: str, number: int) -> ByLoad:
        """Return what was measured of a class."""
        return self._seconds[shape][number]

    def plan(self, shape: str, num_rows: int, stock: str, among: Collection[str] | None = None) -> str:
        """Return the plan of the nearest class that was measured; `stock` if there is none near.

        `among` are the plans that may be chosen; None: all.
        """
        near = self._near(shape, num_rows)
        if near is None:
            return stock
        loads = self._seconds[shape][near]
        allowed = {
            load: {name: each for name, each in times.items() if among is None or name in among}
            for load, times in loads.items()
        }
        return choose(allowed, stock)

    def is_near(self, shape: str, num_rows: int) -> bool:
        """Whether a class was measured that says what this number of rows takes."""
        return self._near(shape, num_rows) is not None

    def steps(self, shape: str, stock: str, among: Collection[str] | None = None) -> tuple[tuple[int, str], ...]:
        """Return `plan` as a function of the rows: each plan after the first number of rows that it does not serve."""
        last = max(self._seconds.get(shape, {}), default=0) + FARTHEST_CLASSES + 1
        plans = [(self.plan(shape, rows_of_class(number), stock, among), number) for number in range(last + 1)]
        ends = [(_first_row(number + 1), plan) for plan, number in plans]
        return tuple(step for step, after in zip(ends, [*ends[1:], (0, "")], strict=True) if step[1] != after[1])

    def _near(self, shape: str, num_rows: int) -> int | None:
        number = row_class(num_rows)
        near = min(self._seconds.get(shape, {}), key=lambda other: (abs(other - number), other), default=None)
        return None if near is None or abs(near - number) > FARTHEST_CLASSES else near

    def _replace(self) -> None:
        seconds = {
            shape: {str(number): _encoded(loads) for number, loads in sorted(classes.items())}
            for shape, classes in sorted(self._seconds.items())
        }
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".part", delete=False) as file:
            json.dump({"of": dict(self.of), "seconds": seconds}, file, indent=1)
        Path(file.name).replace(self.path)


def _first_row(number: int) -> int:
    """Return the least number of rows in a class."""
    rows = int(2 ** ((number - 0.5) / CLASSES_AN_OCTAVE))
    return next(count for count in range(max(1, rows - 1), rows + 3) if row_class(count) >= number)


def _encoded(loads: ByLoad) -> dict[str, dict[str, list[float]]]:
    return {
        load: {
            name: [each.clock.median, each.clock.error, each.device.median, each.device.error]
            for name, each in times.items()
        }
        for load, times in loads.items()
    }


def _class_of(text: str) -> int:
    number = int(text)
    if not 0 <= number <= MOST_CLASSES:
        raise ValueError(f"there is no class {number} of rows")
    return number


def _decoded(loads: Any) -> dict[str, dict[str, Times]]:
    return {load: {name: _times(*map(float, each)) for name, each in times.items()} for load, times in loads.items()}


def _times(clock: float, clock_error: float, device: float, device_error: float) -> Times:
    return Times(_seconds(clock, clock_error), _seconds(device, device_error))


def _seconds(median: float, error: float) -> Seconds:
    if not (0 < median < math.inf and 0 <= error < math.inf):
        raise ValueError(f"{median} +- {error} are no seconds")
    return Seconds(median, error)


def _host_processor() -> str:
    """Return the name of the host's processor, which launches."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
