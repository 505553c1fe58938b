"""The least and the most that an option takes."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bexp.api.cli import app
from bexp.api.cli.errors import ExitCode
from bexp.api.listener import ListenError
from bexp.api.settings import ServiceSettings
from bexp.storage.database import Database

BEYOND = " than or equal to "
WIDE = {"COLUMNS": "200"}


@dataclass(frozen=True)
class Bounds:
    """The numbers that an option takes, and the others beside it that keep the command from doing more."""

    option: str
    least: float
    most: float = math.inf
    step: float = 1
    stop: tuple[str, ...] = ()


COMMANDS = {
    "audit": [Bounds("--limit", 1, 100_000)],
    "best none": [Bounds("--min-confidence", 0, 99)],
    "check-accumulation": [
        Bounds("--batch-size", 2, stop=("--device", "replay:x", "--", "true")),
        Bounds("--micro-batch-size", 1, stop=("--device", "replay:x", "--", "true")),
    ],
    "list": [Bounds("--limit", 1, 1000)],
    "mcp --http": [Bounds("--port", 0, 65535)],
    "prune": [
        Bounds("--older-than-days", 0, 36_500, stop=("--dry-run",)),
        Bounds("--audit-older-than-days", 0, 36_500, stop=("--dry-run",)),
        Bounds("--keep", 0, stop=("--dry-run",)),
    ],
    "quota set team-a": [
        Bounds("--queued", 0, 2_000_000_000),
        Bounds("--running", 0, 2_000_000_000),
        Bounds("--stored-gb", 0, 1e6, step=0.5),
    ],
    "serve": [
        Bounds("--port", 0, 65535),
        Bounds("--max-wait-hours", 0.001, step=0.0001),
        Bounds("--token-rate", 0),
        Bounds("--address-rate", 0),
        Bounds("--token-streams", 0),
        Bounds("--keep-days", 0, step=0.5),
        Bounds("--keep-jobs", 0),
    ],
    "submit none.yaml": [Bounds("--priority", -100, 100)],
    "tune": [Bounds("--batch-size", 1, stop=("--", "no-such-program"))],
}


@pytest.fixture(autouse=True)
def _nothing_is_served(sqlite_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(*_: Any, **__: Any) -> None:
        raise ListenError("not here")

    monkeypatch.setattr("bexp.api.serve.serve", serve)
    monkeypatch.setenv("BEXP_DATABASE_URL", sqlite_database.url)
    monkeypatch.delenv("BEXP_API_URL", raising=False)


@pytest.mark.parametrize(
    ("command", "bounds"),
    [
        pytest.param(command, bounds, id=f"{command} {bounds.option}")
        for command, each in COMMANDS.items()
        for bounds in each
    ],
)
def test_an_option_takes_its_least_and_its_most_and_nothing_beyond(command: str, bounds: Bounds) -> None:
    ends = {bounds.least: False, bounds.least - bounds.step: True}
    ends |= {10**6: False} if math.isinf(bounds.most) else {bounds.most: False, bounds.most + bounds.step: True}
    for value, is_refused in ends.items():
        done = CliRunner().invoke(app, [*command.split(), f"{bounds.option}={value}", *bounds.stop], env=WIDE)
        assert done.exception is None or isinstance(done.exception, SystemExit), (value, done.exception)
        assert (BEYOND in done.stderr) is is_refused, (value, done.stderr)
        assert not is_refused or (done.exit_code, done.stdout) == (ExitCode.USAGE, "")


def test_serve_gives_the_service_these_settings_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("bexp.api.serve.serve", lambda settings, host, port, **_: given.extend((settings, host, port)))
    assert CliRunner().invoke(app, ["serve", "--max-wait-hours", "2"]).exit_code == 0
    settings, host, port = given
    assert isinstance(settings, ServiceSettings)
    assert (host, port, settings.max_wait_seconds) == ("127.0.0.1", 8642, 7200)
    assert ServiceSettings("").max_wait_seconds == timedelta(days=7).total_seconds()
    assert (settings.keep_days, settings.keep_jobs) == (None, None)
    assert (settings.token_rate, settings.address_rate, settings.token_streams) == (50, 100, 500)
    assert (settings.require_token, settings.is_open, settings.trusted_proxies) == (False, False, ())
    given.clear()
    options = "--require-token --open --trusted-proxy 10.0.0.0/8 --host ::1 --port 0 --keep-days 2.5 --keep-jobs 7"
    options += " --token-rate 1 --address-rate 2 --token-streams 3 --log-dir logs"
    assert CliRunner().invoke(app, ["serve", *options.split()]).exit_code == 0
    settings, host, port = given
    assert (host, port, settings.keep_days, settings.keep_jobs, settings.log_dir) == ("::1", 0, 2.5, 7, Path("logs"))
    assert (settings.token_rate, settings.address_rate, settings.token_streams) == (1, 2, 3)
    assert (settings.require_token, settings.is_open) == (True, True)
    assert settings.trusted_proxies == (ipaddress.ip_network("10.0.0.0/8"),)
    given.clear()
    assert CliRunner().invoke(app, ["serve"], env={"BEXP_HOST": "::1", "BEXP_PORT": "80"}).exit_code == 0
    assert given[1:] == ["::1", 80]
