from __future__ import annotations

import pytest

from bexp.api.settings import read_environment
from bexp.workers.settings import read_settings


@pytest.mark.parametrize(
    "variables", [{}, {"XDG_DATA_HOME": "/data"}, {"XDG_DATA_HOME": "data"}, {"BEXP_DATABASE_URL": "sqlite:////x.db"}]
)
def test_workers_and_api_find_the_same_database(variables: dict[str, str]) -> None:
    assert read_settings(variables).database_url == read_environment(variables).database_url
