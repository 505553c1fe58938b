"""Device locks of each test's own, so that tests that own the CPU do not wait for each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from bexp.workers.devices.lock import FOLDER_VARIABLE


@pytest.fixture(autouse=True)
def _own_device_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
