"""Experts spread over two GPUs, compared with one process in float64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bexp.kernels import expert_parallel_ranks as ranks
from tests.gpu.needs import visible

pytestmark = visible(2)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes found out together."""
    return ranks.launch(tmp_path_factory.mktemp("ranks"), "cuda")


@pytest.mark.parametrize("case", ranks.gpu_cases(), ids=lambda case: case.name)
def test_output_and_gradients_are_those_of_one_process(found: list[dict[str, Any]], case: ranks.Case) -> None:
    for rank in found:
        assert max(rank[case.name].values()) <= 2e-2


def test_the_host_waits_once_for_the_counts(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert len(rank["waits"]) == 1
