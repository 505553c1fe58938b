from __future__ import annotations

from pathlib import Path

import pytest

from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.search.legal_space import prune_space
from tests.simulated_tables import h200_report

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TABLES = sorted((FOLDER / "tables").glob("*.yaml"))
WAITING = sorted((FOLDER / "waiting").glob("*.yaml"))


def test_there_are_at_least_ten_of_them_and_three_to_be_timed_whole() -> None:
    assert len(TABLES) >= 10
    assert sum(path.stem.startswith("whole-") for path in TABLES) >= 3


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_request_has_a_space_that_can_be_recorded(path: Path) -> None:
    request = parse_request(load_document(path.read_text()))
    table = prune_space(request.shapes, request, h200_report(request.shapes)).table
    assert table is not None
    assert len(table.candidates) >= 20
    assert len(table.components) <= 250  # a minute or two of one GPU


@pytest.mark.parametrize("path", WAITING, ids=lambda path: path.stem)
def test_what_people_wait_for_can_be_asked(path: Path) -> None:
    assert parse_request(load_document(path.read_text())).num_devices == 1
