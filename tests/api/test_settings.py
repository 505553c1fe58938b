from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from bexp.api import background, listener, local_worker, rate_limits, streams, tokens, turns
from bexp.api.agents import commands
from bexp.api.cli import local_run, mcp
from bexp.api.settings import ServiceSettings, read_environment
from bexp.client.address import is_loopback
from bexp.storage import components, matching, quotas
from bexp.storage.audit import KEEP_AUDIT, MOST_RECORDS
from bexp.storage.database import DatabaseLimits
from bexp.storage.queue import WAITING_GRACE
from bexp.storage.queue_settings import LONGEST_PAUSE, QueueSettings
from bexp.storage.quotas import MAX_STORED_BYTES
from bexp.storage.run_reports import MAX_EXPLORATIONS, MAX_REPORTS
from bexp.storage.submission import KEY_LIFETIME
from bexp.storage.waiting import MAX_WAIT
from bexp.workers.jobs import runner, worker


def test_nothing_need_be_set() -> None:
    environment = read_environment({"HOME": "/home/ada"})
    assert environment.api_url is None
    assert environment.api_token is None
    assert environment.database_url.startswith("sqlite:////")
    assert environment.database_url.endswith("/.local/share/bexp/bexp.db")
    assert (environment.host, environment.port) == ("127.0.0.1", 8642)
    assert USUAL.max_wait_seconds == 7 * DAY.total_seconds()


def test_the_environment_is_read() -> None:
    environment = read_environment(
        {
            "BEXP_DATABASE_URL": "postgresql://db/bexp",
            "BEXP_API_URL": "https://bexp.example.org",
            "BEXP_API_TOKEN": "bexp_x",
            "BEXP_HOST": "0.0.0.0",
            "BEXP_PORT": "80",
        }
    )
    assert environment.database_url == "postgresql://db/bexp"
    assert environment.api_url == "https://bexp.example.org"
    assert environment.api_token == "bexp_x"
    assert (environment.host, environment.port) == ("0.0.0.0", 80)


def test_an_empty_variable_counts_as_not_set() -> None:
    assert read_environment({"BEXP_API_URL": "", "BEXP_API_TOKEN": ""}) == read_environment({})


@pytest.mark.parametrize(("home", "url"), [("/data", "sqlite:////data/bexp/bexp.db"), ("relative", None)])
def test_the_database_is_in_the_data_directory(home: str, url: str | None) -> None:
    found = read_environment({"XDG_DATA_HOME": home}).database_url
    assert found == (url or read_environment({}).database_url)


@pytest.mark.parametrize(("given", "token"), [("bexp_x\n", "bexp_x"), (" ", None)])
def test_what_surrounds_a_token_is_none_of_it(given: str, token: str | None) -> None:
    assert read_environment({"BEXP_API_TOKEN": given}).api_token == token


@pytest.mark.parametrize("token", ["bexp_\nx", "bexp_é", "bexp_\x00"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="BEXP_API_TOKEN"):
        read_environment({"BEXP_API_TOKEN": token})


@pytest.mark.parametrize("port", [0, 65535])
def test_a_port_is_the_least_or_the_most_that_there_is(port: int) -> None:
    assert read_environment({"BEXP_PORT": str(port)}).port == port


@pytest.mark.parametrize("port", ["-1", "65536", "99999", "x", "٣", "1e3"])
def test_an_odd_port_is_refused(port: str) -> None:
    with pytest.raises(ValueError, match="BEXP_PORT"):
        read_environment({"BEXP_PORT": port})


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("LOCALHOST.", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("127.0.0.1.nip.io", False),
        ("", False),
    ],
)
def test_loopback_is_told_from_the_rest(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


DOCS = Path(__file__).parents[2] / "docs"
USUAL = ServiceSettings("sqlite:///bexp.db")
DAY, HOUR = timedelta(days=1), timedelta(hours=1)


@pytest.mark.parametrize(
    ("document", "sentence", "limit"),
    [
        ("service", r"a request \| (\S+) KiB", USUAL.max_body_bytes / 1024),
        ("service", r"time for the header, for the body, [^|]+\| (\S+) s", USUAL.header_seconds),
        ("service", r"time for the header, for the body, [^|]+\| (\S+) s", USUAL.body_seconds),
        ("service", r"open connections \| (\S+),", USUAL.max_connections),
        ("service", r"start of the response \| (\S+) s", USUAL.answer_seconds),
        ("service", r"requests a second of a token, of an address \| (\S+),", USUAL.token_rate),
        ("service", r"requests a second of a token, of an address \| \S+, (\S+),", USUAL.address_rate),
        ("service", r"local user at a time \| (\S+)", turns.AT_ONCE),
        ("service", r"the next ones wait (\S+) s, then 429", turns.WAITING_SHARE * USUAL.answer_seconds),
        ("service", r"503 if it is one of the first (\S+) ", turns.FEW),
        ("service", r"with a comment every (\S+) s", USUAL.keep_alive_seconds),
        ("service", r"open streams of a token, of all together \| (\S+)", USUAL.token_streams),
        ("owners", r"What (\S+) seconds allow may come at once", rate_limits.BURST_SECONDS),
        ("owners", r"looks each of the last \S+ tokens up again after (\S+) s", USUAL.token_check_seconds),
        ("owners", r"looks each of the last (\S+) tokens up again", tokens.MAX_KEPT),
        ("owners", r"for the last (\S+) tokens or addresses", rate_limits.MAX_KEYS),
        ("operations", r"asks for new events every (\S+) s", USUAL.poll_seconds),
        ("operations", r"asks for new events every \S+ s instead of every (\S+) s", streams.LISTENING_POLL_SECONDS),
        ("operations", r"Every (\S+) s it notes why explorations have waited", USUAL.waiting_check_seconds),
        ("operations", r"`BEXP_POLL_SECONDS` \((\S+) s\)", worker.MAX_POLL_SECONDS),
        (
            "operations",
            r"Idle workers look for expired leases every (\S+) s",
            worker.LISTENING_FACTOR * worker.MAX_POLL_SECONDS,
        ),
        (
            "operations",
            r"dies or freezes is replaced within (\S+) s",
            background.TERM.total_seconds() + USUAL.waiting_check_seconds,
        ),
        ("answer", r"and `serve` \(every (\S+) s\)", background.WRITE_SECONDS),
        ("answer", r"its processes within (\S+) s", local_worker.GRACE_SECONDS),
        ("operations", r"A cancelled exploration ends within (\S+) s", local_run.CANCEL_SECONDS),
        ("agents", r"at http://127.0.0.1:(\d+)/mcp", mcp.PORT),
        ("agents", r"which gives each (\S+) s to stop", commands.GRACE_SECONDS),
        ("service", r"open files allow; (\S+) more wait", listener.QUEUED),
        ("service", r"one that fails starts again after (\S+) s", background.RESTART_SECONDS),
        ("service", r"gives open requests (\S+) s", listener.SHUTDOWN_SECONDS),
        ("when-something-goes-wrong", r"not started after (\S+) s: REASON", local_run.REMIND_SECONDS),
        ("service", r"honours `Idempotency-Key` for (\S+) hours", KEY_LIFETIME / HOUR),
        ("owners", r"returns the same exploration for (\S+) hours", KEY_LIFETIME / HOUR),
        ("service", r"An idle one gives it back after (\S+) s", worker.REST_SECONDS),
        ("service", r"the lease expires after (\S+) s", QueueSettings().lease.total_seconds()),
        ("operations", r"The lease is (\S+) s \(", QueueSettings().lease.total_seconds()),
        ("service", r"After (\S+) days in the queue", MAX_WAIT / DAY),
        ("service", r"the API does so after (\S+) days", KEEP_AUDIT / DAY),
        ("owners", r"rows older than (\S+) days and", KEEP_AUDIT / DAY),
        ("owners", r"beyond a (\S+) of one owner", MOST_RECORDS),
        ("service", r"owners: at most (\S+), 0.8 kB each, for", components.MAX_ROWS),
        ("service", r"0.8 kB each, for at most (\S+) days", components.MAX_AGE / DAY),
        ("answer", r"kept for up to (\S+) days", components.MAX_AGE / DAY),
        ("service", r"of the owner: none, (\S+) GB", MAX_STORED_BYTES / 1e9),
        ("service", r"connection, lock, statement, pool \| (\S+) s,", DatabaseLimits().connect.total_seconds()),
        ("service", r"statement, pool \| \S+ s, (\S+) s,", DatabaseLimits().lock.total_seconds()),
        ("service", r"statement, pool \| \S+ s, \S+ s, (\S+) s,", DatabaseLimits().statement.total_seconds()),
        ("service", r"statement, pool \| \S+ s, \S+ s, \S+ s, (\S+) s", DatabaseLimits().pool.total_seconds()),
        ("operations", r"a request waits at most (\S+) s for its turn", DatabaseLimits().turn.total_seconds()),
        ("operations", r"PostgreSQL frees such locks after (\S+) s", DatabaseLimits().idle_transaction.total_seconds()),
        ("operations", r"why explorations have waited for (\S+) s", WAITING_GRACE.total_seconds()),
        ("operations", r"Its worker looks (\S+) a second", 1 / runner.POLL.total_seconds()),
        ("configuration", r"of which the first may have stored trials \| (\S+) \|", QueueSettings().max_attempts),
        ("configuration", r"without a stored trial between them \| (\S+) \|", QueueSettings().max_faults),
        ("configuration", r"up to \S+ s \| (\S+) \|", QueueSettings().retry_pause.total_seconds()),
        ("configuration", r"it doubles each time, up to (\S+) s", LONGEST_PAUSE.total_seconds()),
        ("configuration", r"idle worker asks again \(at least (\S+)\)", worker.MIN_POLL_SECONDS),
        ("owners", r"sums what an owner stores once in (\S+) s", quotas.SUM_SECONDS),
        ("owners", r"by 1/(\S+) for each further API process", 1 / quotas.SHARE_OF_ROOM),
        ("service", r"memory \(within a (\S+)\)", matching.MEMORY_TOLERANCE),
        ("service", r"up to (\S+) reports of what real runs", MAX_REPORTS),
        ("service", r"the owner's later explorations of that model use those of the last (\S+) \|", MAX_EXPLORATIONS),
        ("answer", r"the last (\S+) runs of a component", components.MAX_RUNS),
        ("answer", r"at most (\S+) runs in all", components.MAX_REUSED),
        ("service", r"connections to PostgreSQL \| (\S+) of an API process", DatabaseLimits().max_connections),
    ],
)
def test_a_limit_is_what_the_documents_say(document: str, sentence: str, limit: float) -> None:
    text = " ".join((DOCS / f"{document}.md").read_text().split())
    words = {"tenth": 0.1, "two": 2, "twice": 2, "four": 4, "seven": 7, "million": 10**6}
    assert [float(words.get(said, said.replace(",", ""))) for said in re.findall(sentence, text)] == [limit]


def test_streams_leave_a_quarter_of_the_connections_to_other_requests() -> None:
    assert replace(USUAL, max_connections=8).max_streams == 6
    assert replace(USUAL, max_connections=9).max_streams == 6
