"""The variables that say how long leases last and how often a job is tried."""

from __future__ import annotations

from datetime import timedelta

import pytest

from bexp.storage.queue_settings import QueueSettings, read_queue_settings

DEFAULT = QueueSettings()


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        ({}, DEFAULT),
        ({"BEXP_LEASE_SECONDS": "", "BEXP_MAX_FAULTS": ""}, DEFAULT),
        (
            {"BEXP_LEASE_SECONDS": "1", "BEXP_RETRY_SECONDS": "0"},
            QueueSettings(timedelta(seconds=1), 20, 3, timedelta()),
        ),
        ({"BEXP_LEASE_SECONDS": "86400"}, QueueSettings(lease=timedelta(days=1))),
        (
            {"BEXP_MAX_ATTEMPTS": "1", "BEXP_MAX_FAULTS": "99999999"},
            QueueSettings(max_attempts=1, max_faults=99_999_999),
        ),
    ],
)
def test_variables_that_are_in_range(variables: dict[str, str], settings: QueueSettings) -> None:
    assert read_queue_settings(variables) == settings


@pytest.mark.parametrize(
    ("name", "value", "range_"),
    [
        *(("BEXP_LEASE_SECONDS", value, "from 1 to 86400") for value in ("0.9", "86401", "x", "nan")),
        *(("BEXP_RETRY_SECONDS", value, "from 0 to 86400") for value in ("-0.1", "inf")),
        *(("BEXP_MAX_ATTEMPTS", value, "from 1 to 99999999") for value in ("0", "-1", "\u00b2", "100000000", "1.0")),
        ("BEXP_MAX_FAULTS", "0", "from 1 to 99999999"),
    ],
)
def test_variables_that_are_out_of_range(name: str, value: str, range_: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number .*{range_}"):
        read_queue_settings({name: value})


def test_a_pause_doubles_up_to_a_minute() -> None:
    pauses = [DEFAULT.pause(number).total_seconds() for number in (0, 1, 2, 3, 6, 7, 1000)]
    assert pauses == [1, 1, 2, 4, 32, 60, 60]
