from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from bexp.api.settings import read_environment
from bexp.storage.queue_settings import read_queue_settings
from bexp.workers.settings import read_settings


@pytest.mark.parametrize(
    "variables", [{}, {"XDG_DATA_HOME": "/data"}, {"XDG_DATA_HOME": "data"}, {"BEXP_DATABASE_URL": "sqlite:////x.db"}]
)
def test_workers_and_api_find_the_same_database(variables: dict[str, str]) -> None:
    assert read_settings(variables).database_url == read_environment(variables).database_url


def test_without_variables_the_settings_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    told = {name: int(value) for name, value in re.findall(r"^\| `(BEXP_\w+)` \|.*\| (\d+) \|$", page, re.MULTILINE)}
    queue, worker, second = read_queue_settings({}), read_settings({}), timedelta(seconds=1)
    assert told == {
        "BEXP_LEASE_SECONDS": queue.lease / second,
        "BEXP_MAX_ATTEMPTS": queue.max_attempts,
        "BEXP_MAX_FAULTS": queue.max_faults,
        "BEXP_RETRY_SECONDS": queue.retry_pause / second,
        "BEXP_POLL_SECONDS": worker.max_poll / second,
        "BEXP_DEVICE_WAIT_SECONDS": worker.device_wait / second,
    }
