from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.context_parallel import compare
from benchmarks.context_parallel_contenders import draw
from bexp.kernels.context_parallel.layouts import LAYOUTS
from tests.forked_ranks import run_ranks


@pytest.mark.slow(together="forked")
def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    run_ranks("tests.benchmarks.context_parallel_ranks", tmp_path)
    found = json.loads((tmp_path / "first.json").read_text())
    printed = (tmp_path / "printed").read_text()
    assert found["num_devices"] == 2
    checks = found["checks"]["flash"]
    for layout in ("alone", *LAYOUTS):
        assert max(checks[layout]["errors"].values()) <= 1e-5
    assert "errors" in checks["torch alltoall"] or checks["torch alltoall"]["reason"]
    (cell,) = found["cells"]
    assert cell["seq_length"] == 64
    assert cell["ideal_seconds"] > 0
    assert set(cell["timed"]) == {name for name, check in checks.items() if "reason" not in check}
    for layout in LAYOUTS:
        assert cell["timed"][layout]["seconds"] > 0
        assert len(cell["timed"][layout]["seconds_by_rank"]) == 2
        assert f"  {layout}" in printed
    kept, new = json.loads((tmp_path / "continued.json").read_text())["cells"]
    assert kept == cell
    assert (new["seq_length"], new["rounds"]) == (128, 1)


def test_shares_of_the_ideal() -> None:
    """Two devices that need 2 and 4 s for the whole do it together in 4/3 s."""
    problem = draw(128, (2, 1, 8), torch.float32, torch.device("cpu"))
    assert problem.flops == 7 * 128**2 * 2 * 8
    timed = {
        "alone": {"seconds": 4.0, "seconds_by_rank": [2.0, 4.0]},
        "ring": {"seconds": 3.2, "seconds_by_rank": [2.0, 3.2]},
        "striped": {"seconds": 1.6, "seconds_by_rank": [1.6, 1.6]},
    }
    assert compare(timed, problem, 2)["ideal_seconds"] == pytest.approx(4 / 3)
    assert timed["striped"]["share_of_ideal"] == pytest.approx(5 / 6)
    assert timed["striped"]["speed_over_ring"] == pytest.approx(2)
    assert timed["alone"]["flops_per_second_and_device"] == problem.flops / 4
    assert timed["ring"]["flops_per_second_and_device"] == problem.flops / 3.2 / 2
