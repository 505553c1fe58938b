"""Records of the service: threads and requests share them, so nobody changes one or adds to it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import is_dataclass
from typing import Any

import pytest

import bexp.api
import bexp.storage
import bexp.workers.jobs

STATES = {"_Task", "_Watch", "OpenStream", "_Sum"}
"""What is counted in."""


def records() -> dict[str, Any]:
    """Every dataclass of the service and of workers, by its name; a command has its own to itself."""
    found: dict[str, Any] = {}
    for package in (bexp.api, bexp.storage, bexp.workers.jobs):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.startswith(("bexp.storage.migrations.", "bexp.api.cli")):
                inner = vars(importlib.import_module(module.name)).values()
                classes = [one for one in inner if inspect.isclass(one) and one.__module__ == module.name]
                found |= {one.__name__: one for one in classes if is_dataclass(one)}
    return found


@pytest.mark.parametrize("record", records().values(), ids=records())
def test_a_record_stays_as_it_was_made(record: Any) -> None:
    assert "__slots__" in vars(record)
    assert record.__dataclass_params__.frozen is (record.__name__ not in STATES)
