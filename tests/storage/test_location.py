from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bexp.api.settings import read_environment
from bexp.storage.location import default_database_url
from bexp.workers.settings import read_settings


def test_the_default_is_the_same_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = default_database_url()
    monkeypatch.chdir(tmp_path)
    assert default_database_url() == before


@pytest.mark.parametrize("variables", [{}, {"XDG_DATA_HOME": "/data"}, {"XDG_DATA_HOME": "relative"}])
def test_the_api_and_its_workers_meet_at_one_database(variables: dict[str, str]) -> None:
    assert read_environment(variables).database_url == read_settings(variables).database_url


def test_a_command_that_only_asks_where_loads_no_database_driver() -> None:
    script = "import bexp.api.settings, sys; sys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=False).returncode == 0
