"""The targets that are installed here: the code whose training step can be measured. Nothing is imported to find them.

A package registers targets of its own under the entry-point group `bexp.targets`:

    [project.entry-points."bexp.targets"]
    my-gpt = "my_package.training:Target"
"""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

GROUP = "bexp.targets"
REFERENCE = "bexp"
TRANSFORMERS = "transformers"
RESERVED = re.compile(rf"{REFERENCE}|{TRANSFORMERS}|local(\..*)?")
"""Names that no package can register. `local.train` is the target that a person names by its file, `train.py`."""
NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
UNKNOWN_VERSION = "unknown"


def installed_targets() -> dict[str, str]:
    """Return the version of each target by name. A registered target has the version of its package."""
    versions = {REFERENCE: version_of("bexp") or UNKNOWN_VERSION}
    library = version_of(TRANSFORMERS)
    if library is not None:
        versions[TRANSFORMERS] = library
    for name, point in registered_targets().items():
        versions[name] = point.dist.version if point.dist is not None else UNKNOWN_VERSION
    return versions


def registered_targets() -> dict[str, EntryPoint]:
    """Return the entry points of the group by name, without those whose name is reserved or not a valid one."""
    points = entry_points(group=GROUP)
    return {point.name: point for point in points if NAME.fullmatch(point.name) and not RESERVED.fullmatch(point.name)}


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
