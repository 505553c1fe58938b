"""The settings of a worker. Only this module reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from storage.location import default_database_url


@dataclass(frozen=True, slots=True)
class Settings:
    """BEXP_DATABASE_URL, BEXP_LOCAL_TARGET, and the environment that profiler processes inherit.

    `local_target` is the target that a person has named by its file, as `/home/me/train.py:Target`.

    BEXP_LOCK_DIRECTORY in that environment says where the device locks lie, see `workers.devices.lock`.
    """

    database_url: str
    environment: Mapping[str, str]
    local_target: str | None = None


def read_settings(variables: Mapping[str, str] | None = None) -> Settings:
    """Read `variables` (default: this process's environment). An empty variable counts as not set."""
    given = dict(os.environ if variables is None else variables)
    url = given.get("BEXP_DATABASE_URL") or default_database_url(given.get("XDG_DATA_HOME", ""))
    return Settings(database_url=url, environment=given, local_target=given.get("BEXP_LOCAL_TARGET") or None)
