from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.environment import begin


def test_a_run_of_the_same_device_and_settings_goes_on_and_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    hardware = {"device_kind": "cuda", "device_name": "H100", "memory_bytes": 80 << 30, "versions": {"torch": "2.11"}}
    fresh: dict[str, Any] = {"hardware": hardware, "kernels": "abc", "rows": []}
    assert begin(path, fresh, same=("kernels",)) == fresh
    path.write_text(json.dumps(fresh | {"rows": [1]}))
    continued = begin(path, fresh | {"shape": (1, 2)}, same=("kernels",))
    assert continued["rows"] == [1]
    assert continued["shape"] == (1, 2)
    assert len(continued["continued"]) == 1
    for other in ({"kernels": "def"}, {"hardware": hardware | {"device_name": "H200"}}):
        with pytest.raises(ValueError, match="of another run"):
            begin(path, fresh | other, same=("kernels",))
