from __future__ import annotations

import pytest

from tests.chaos.campaign import run_campaign

pytestmark = pytest.mark.slow


def test_a_few_faults_break_no_promise() -> None:
    result = run_campaign(3.0, postgres=False, seed=1, num_trials=6)
    assert result.violations == []
    assert result.jobs >= 1
    assert result.as_json()["num_faults"] != 0
