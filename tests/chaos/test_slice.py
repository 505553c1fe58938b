from __future__ import annotations

import signal
import threading
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from bexp.api.settings import ServiceSettings
from bexp.storage.database import Database
from tests.api.serving import start
from tests.chaos import crowd, promises
from tests.chaos.campaign import Plan, run_campaign
from tests.chaos.crowd import Crowd
from tests.chaos.processes import TABLES
from tests.chaos.promises import EXPECTED, broken_promises, read_stored
from tests.chaos.result import Result, document_of_result
from tests.chaos.rounds import read_rounds, run_rounds
from tests.chaos.soak import Sample, growth
from tests.waits import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.slow


def test_a_few_faults_break_no_promise() -> None:
    result = run_campaign(Plan(seconds=2.0, seed=1, fault_seconds=0.3, num_workers=2, num_cancels=1, measures=False))
    assert result.violations == []
    assert result.jobs >= 1
    assert result.faults
    assert result.calls["submit"] >= result.jobs
    (seconds,) = result.cancel_seconds
    assert seconds > 0


def test_clients_do_everything_and_each_answer_or_its_lack_is_judged(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(crowd, "PRUNE_PAUSE_SECONDS", 0.5)
    monkeypatch.setattr(crowd, "KEPT_JOBS", 2)
    monkeypatch.setattr(crowd, "PATIENCE_SECONDS", PATIENCE_SECONDS)  # a busy host takes longer than is promised
    monkeypatch.setattr(promises, "ANSWER_SECONDS", PATIENCE_SECONDS)
    served = start(ServiceSettings(sqlite_database.url, require_token=True, token_rate=0, address_rate=0))
    service: Any = SimpleNamespace(
        url=served.url, tables=TABLES, measures=False, api=None, note_answer=lambda api: None
    )
    clients = Crowd(service, sqlite_database, Random(1), num_trials=6, open_jobs=9)
    calls = clients.history.calls
    clients.start()
    try:
        wait_until(lambda: {call.operation for call in list(calls)} == {*EXPECTED, "prune"})
        wait_until(lambda: {"cancel", "resume", "delete"} <= {call.operation for call in list(calls) if call.is_done})
    finally:
        clients.stop()
        served.stop()
    sent = [call for call in calls if call.operation == "submit" and call.seen is not None]
    assert {call.owner for call in sent} == set(crowd.OWNERS)
    assert len({(call.owner, call.key) for call in sent}) < len(sent), "keys are sent again"
    assert all(call.seen.labels == {"key": call.key} for call in sent if call.seen is not None)
    assert broken_promises(clients.history, read_stored(sqlite_database), lambda *_: False) == []
    clients.show_all()
    assert (calls[-1].status, calls[-1].error) == (None, "ConnectError")
    (told, *_) = broken_promises(clients.history, read_stored(sqlite_database), lambda *_: False)
    assert told.startswith("no answer within")


@pytest.mark.parametrize(("bytes_a_minute", "files_a_minute"), [(0, 0), (1000, 0), (0, 2)])
def test_a_soak_tells_what_a_process_grows_by_in_an_hour_after_its_warm_up(
    bytes_a_minute: int, files_a_minute: int
) -> None:
    samples = [
        Sample(60.0 * minute, (minute > 15) * 10**8 + minute * bytes_a_minute, 20 + minute * files_a_minute)
        for minute in range(60)
    ]
    grown = growth(samples)
    assert (grown["bytes_an_hour"], grown["files_an_hour"]) == (60 * bytes_a_minute, 60 * files_a_minute)


def test_a_result_names_cancels_that_took_too_long() -> None:
    result = Result("c", "SQLite", 1, faults={"api_kill": 2, "failpoints": 3}, cancel_seconds=[0.5] * 99 + [9.0] * 2)
    result.violations.append("2 orphans")
    document = document_of_result(result)
    assert (document["num_faults"], document["calm_cancels"]["max"]) == (5, 9.0)
    assert document["violations"] == ["2 orphans", "of 101 cancels, 1% took 9 s or longer"]


def test_rounds_are_added_to_a_file_on_both_databases_until_a_signal_ends_them(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"

    def run(plan: Plan, ending: threading.Event) -> Result:
        if read_rounds(path) and plan.postgres:
            raise RuntimeError("the API does not start")
        if read_rounds(path):
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # for which the main thread does not wake
            assert ending.wait(PATIENCE_SECONDS)
        return Result("c", "PostgreSQL" if plan.postgres else "SQLite", plan.seed, faults={"api_kill": 2})

    assert run_rounds(1, Plan(seconds=1, seed=0), path, run=run) == 0
    assert run_rounds(9, Plan(seconds=1, seed=0), path, run=run) == 1
    rounds = read_rounds(path)
    assert [(done["database"], done["num_faults"]) for done in rounds] == [
        ("SQLite", 2),
        ("PostgreSQL", 2),
        ("SQLite", 2),
        ("PostgreSQL", 0),
    ]
    assert rounds[3]["violations"] == ["the campaign stopped: RuntimeError: the API does not start"]
