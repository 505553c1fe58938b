"""`bexp token`, `bexp quota`, `bexp audit` and `bexp prune`."""

from __future__ import annotations

import json
import os
import pwd
import re
import socket
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner, Result

from bexp.api.cli import app
from bexp.api.cli.errors import ExitCode
from bexp.storage.audit import Action, read_audit
from bexp.storage.database import Database
from bexp.storage.jobs import JobState, list_jobs
from bexp.storage.owners import Scope
from bexp.storage.queue import Queue
from bexp.storage.quotas import EVERYBODY, Quota, list_quotas
from bexp.storage.tokens import list_tokens, verify_token
from tests.contracts.samples import make_request


@pytest.fixture(autouse=True)
def _environment(sqlite_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEXP_DATABASE_URL", sqlite_database.url)


def bexp(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_a_token_is_created_with_an_owner_scopes_and_an_end(sqlite_database: Database) -> None:
    made = bexp("token", "create", "--owner", "team-a", "--scope", "submit", "--scope", "read", "--expires", "90d")
    assert made.exit_code == 0, made.output
    token = verify_token(sqlite_database, made.stdout.strip())
    assert token is not None
    assert token.name.startswith("team-a-")
    assert token.name in made.stderr
    assert (token.owner, token.scopes) == ("team-a", frozenset({Scope.SUBMIT, Scope.READ}))
    assert token.expires_at is not None
    assert timedelta(days=89.9) < token.expires_at - datetime.now(UTC) < timedelta(days=90.1)
    (listed,) = json.loads(bexp("token", "list", "--json").stdout)
    assert (listed["owner"], listed["scopes"]) == ("team-a", ["read", "submit"])
    head, row = (line.split("  ") for line in bexp("token", "list").stdout.splitlines())
    assert [cell.strip() for cell in head if cell] == ["NAME", "TOKEN", "OWNER", "SCOPES", "CREATED", "EXPIRES"]
    created, expires = (f"{at.astimezone():%Y-%m-%d %H:%M:%S}" for at in (token.created_at, token.expires_at))
    assert row == [token.name, f"{token.prefix}...", "team-a", "read submit", created, expires]
    assert re.fullmatch("team-a-[0-9a-f]{6}", token.name)
    assert made.stderr == f"token {token.name} of team-a: read, submit\nkeep it, because it is not shown again\n"
    for wrong in (("--expires", "soon"), ("--scope", "all"), ("--owner", "a b")):
        assert bexp("token", "create", "x", *wrong).exit_code == ExitCode.USAGE
    assert len(list_tokens(sqlite_database)) == 1


def test_a_token_without_options_is_local_for_the_usual_scopes_and_does_not_end(sqlite_database: Database) -> None:
    made = json.loads(bexp("token", "create", "laptop", "--json").stdout)
    secret = made.pop("token")
    assert made == {"name": "laptop", "owner": "local", "scopes": ["cancel", "read", "submit"]}
    assert verify_token(sqlite_database, secret) is not None
    assert bexp("token", "list").stdout.splitlines()[1].split()[-1] == "-"
    (listed,) = json.loads(bexp("token", "list", "--json").stdout)
    assert (listed["expires_at"], listed["prefix"]) == (None, secret[: len(listed["prefix"])])
    assert datetime.fromisoformat(listed["created_at"]) <= datetime.now(UTC)
    assert secret not in bexp("token", "list", "--json").stdout
    again = bexp("token", "create", "laptop")
    assert (again.exit_code, "'laptop' exists" in again.stderr) == (ExitCode.USAGE, True)
    assert bexp("token", "revoke", "laptop").stderr == "token laptop is revoked\n"
    unknown = bexp("token", "revoke", "laptop")
    assert (unknown.exit_code, "no token named 'laptop'" in unknown.stderr) == (ExitCode.USAGE, True)


def test_quotas_are_set_listed_and_removed(sqlite_database: Database) -> None:
    assert bexp("quota", "set", "team-a", "--queued", "100", "--running", "4", "--stored-gb", "5").exit_code == 0
    assert bexp("quota", "set", EVERYBODY, "--running", "36").exit_code == 0
    expected = {EVERYBODY: Quota(None, 36), "team-a": Quota(100, 4, 5_000_000_000)}
    assert list_quotas(sqlite_database) == expected
    assert [line.split() for line in bexp("quota", "list").stdout.splitlines()] == [
        ["OWNER", "QUEUED", "RUNNING", "STORED"],
        ["*", "-", "36", "1", "GB"],
        ["team-a", "100", "4", "5", "GB"],
    ]
    assert json.loads(bexp("quota", "list", "--json").stdout)[EVERYBODY]["max_running"] == 36
    assert bexp("quota", "set", "team-b", "--queued", "0").stderr == "the quota of team-b is set\n"
    assert list_quotas(sqlite_database)["team-b"] == Quota(0)
    assert bexp("quota", "set", "team-b").exit_code == 0
    assert bexp("quota", "set", "team-a").stderr == "the quota of team-a is removed\n"
    assert list(list_quotas(sqlite_database)) == [EVERYBODY]
    for wrong in (("a b", "--queued", "1"), ("team-a", "--queued", "2000000001")):
        assert bexp("quota", "set", *wrong).exit_code == ExitCode.USAGE


def test_the_audit_is_shown_and_pruned(sqlite_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "mallory")
    bexp("token", "create", "t")
    bexp("token", "revoke", "t")
    shown = bexp("audit").stdout.splitlines()
    assert shown[0].split() == ["AT", "ACTION", "SUBJECT", "OWNER", "TOKEN", "FROM"]
    assert datetime.fromisoformat(shown[1][:19]).astimezone() == pytest.approx(
        datetime.now().astimezone(), abs=timedelta(minutes=5)
    )
    assert shown[1].split()[5:7] == ["local", "-"], "no token did it"
    assert [line.split()[2:5] for line in shown[1:]] == [["revoke", "token", "t"], ["create", "token", "t"]]
    assert shown[1].split()[-1] == f"{pwd.getpwuid(os.getuid()).pw_name}@{socket.gethostname()}"
    (latest,) = json.loads(bexp("audit", "--json", "--limit", "1").stdout)
    assert (latest["action"], latest["subject"], latest["owner"]) == (Action.REVOKE_TOKEN, "t", "local")
    assert json.loads(bexp("audit", "--json", "--owner", "team-a").stdout) == []
    assert bexp("prune", "--keep", "5").exit_code == 0
    assert bexp("prune", "--audit-older-than-days", "36501").exit_code == ExitCode.USAGE
    assert len(read_audit(sqlite_database)) == 2
    assert "records of the audit deleted: 2" in bexp("prune", "--audit-older-than-days", "0").stderr
    assert read_audit(sqlite_database) == []


def test_a_user_without_a_name_is_audited_by_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    nameless: dict[int, pwd.struct_passwd] = {}
    monkeypatch.setattr(pwd, "getpwuid", nameless.__getitem__)
    bexp("token", "create", "t")
    (latest,) = json.loads(bexp("audit", "--json").stdout)
    assert latest["origin"] == f"{os.getuid()}@{socket.gethostname()}"


def test_explorations_are_pruned_by_count(sqlite_database: Database) -> None:
    queue = Queue(sqlite_database)
    for _ in range(3):
        job, _ = queue.enqueue(make_request())
        queue.request_cancel(job.id)
    waiting, _ = queue.enqueue(make_request())
    assert bexp("prune").exit_code == ExitCode.USAGE
    assert "2 explorations would be deleted" in bexp("prune", "--keep", "1", "--dry-run").stderr
    assert "1 exploration would be deleted" in bexp("prune", "--keep", "2", "--dry-run").stderr
    assert bexp("prune", "--keep", "1", "--older-than-days", "30", "--studies").exit_code == 0
    left = list_jobs(sqlite_database)[0]
    assert sorted(job.state for job in left) == [JobState.CANCELLED, JobState.QUEUED]
    assert left[0].id == waiting.id


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--keep 0", ["deleted 2 explorations"]),
        ("--keep 1", ["deleted 1 exploration"]),
        ("--older-than-days 30", ["deleted 0 explorations", "measured components deleted: 0"]),
        ("--older-than-days 0", ["deleted 2 explorations", "measured components deleted: 0"]),
        ("--components", ["measured components deleted: 0"]),
        ("--studies", ["Optuna studies dropped: 0"]),
        ("--audit-older-than-days 0", ["records of the audit deleted: 4"]),
        ("--audit-older-than-days 1", []),
    ],
)
def test_only_what_is_named_is_deleted_and_told(sqlite_database: Database, options: str, said: list[str]) -> None:
    queue = Queue(sqlite_database)
    for _ in range(2):
        queue.request_cancel(queue.enqueue(make_request())[0].id)
    done = bexp("prune", *options.split())
    assert (done.exit_code, done.stdout, done.stderr.splitlines()) == (0, "", said)
