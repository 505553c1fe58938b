"""`bexp mcp` over stdin and stdout: an agent works on this machine."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
from typer.testing import CliRunner

pytest.importorskip("mcp", reason="the extra mcp is not installed")

from mcp import Client, StdioServerParameters
from mcp.server.mcpserver import MCPServer

from bexp.api.agents import server
from bexp.api.agents.commands import Commands
from bexp.api.cli import app
from bexp.api.cli.errors import CommandError
from tests.acceptance.test_explore import TABLES
from tests.api.cli.conversations import READING, Call, talk
from tests.api.cli.samples import TINY
from tests.waits import PATIENCE_SECONDS

Worker = Callable[..., AbstractContextManager[None]]


@pytest.mark.slow
def test_over_stdio_an_agent_explores_on_this_machine(tmp_path: Path) -> None:
    """A recording takes the place of a GPU."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BEXP_")}
    environment |= {"BEXP_DATABASE_URL": f"sqlite:///{tmp_path}/bexp.db", "BEXP_LOCK_DIRECTORY": str(tmp_path)}
    command = ["-P", "-m", "bexp.api.cli", "mcp"]
    server = StdioServerParameters(command=sys.executable, args=command, env=environment, cwd=TABLES.parent)

    async def conversation(client: Client, call: Call) -> None:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert names == READING | {"explore", "tune", "doctor"}
        begun = await call(
            "explore",
            config="benchmarks/tables/gpt2-124m.yaml",
            fields={"budget": {"max_trials": 3}, "micro_batch_size": [4, 8], "recompute": ["none"], "verify": False},
            device="replay:benchmarks/results/tables/gpt2-124m.jsonl",
            wait_seconds=0,
        )
        job_id = begun["job"]["id"]
        assert begun["job"]["state"] in {"starting", "queued", "running"}
        while "no exploration yet" in (status := await call("status", exploration=job_id)) or (
            status["job"]["state"] in {"queued", "running"}
        ):
            await anyio.sleep(0.1)
        assert status["job"]["state"] == "succeeded"
        best = await call("best", exploration=job_id)
        assert best["recommendation"]["candidate"]["micro_batch_size"] == status["job"]["micro_batch_size"]
        assert best["certainty"]["next_measurement"]["worth_at_most"] >= 0.0
        assert "no such option" in (await call("tune", command=["true"], options=["--nonsense"])).lower()

    talk(server, conversation)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    """Starts Python with a program in place of `bexp`."""
    monkeypatch.setattr("bexp.api.agents.commands.module_command", lambda _, *arguments: [sys.executable, *arguments])
    with Commands() as started:
        yield started


def test_a_command_that_goes_on_ends_with_the_server(commands: Commands) -> None:
    endless = commands.start("-c", "import time; time.sleep(99)")
    assert endless.wait(0.0) is None
    assert commands.exploration("latest") == "latest"
    commands.__exit__(None, None, None)
    assert endless._process.returncode is not None


def test_a_command_is_known_by_a_number_until_it_has_an_exploration(commands: Commands, tmp_path: Path) -> None:
    follow = "import sys; sys.stderr.write('exploration ab12, kept in x\\n'); sys.stderr.flush(); input(); print('{}')"
    names = [commands.start("-c", program, folder=tmp_path).name for program in ("pass", "import time; time.sleep(99)")]
    assert names == ["command-1", "command-2"]
    assert commands.exploration("ab12") == "ab12"
    with pytest.raises(CommandError, match="command-2 has begun no exploration yet; ask again"):
        commands.exploration("command-2")
    following = commands.start("-c", follow, stdin="\n")
    assert following.wait(PATIENCE_SECONDS) == {}
    assert commands.exploration(following.name) == "ab12"


def test_a_command_that_cannot_begin_leaves_no_files(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        commands.start("-c", "pass", stdin="secret", folder=tmp_path / "missing")
    assert not list(tmp_path.iterdir())


def test_a_command_that_fails_says_its_last_lines_and_one_that_goes_on_is_waited_for(commands: Commands) -> None:
    failed = commands.start("-c", "import sys; [print(number, file=sys.stderr) for number in range(10)]; sys.exit(3)")
    with pytest.raises(CommandError) as caught:
        failed.wait(PATIENCE_SECONDS)
    assert (caught.value.code, caught.value.lines) == (3, tuple("23456789"))
    with pytest.raises(CommandError, match="9"):
        commands.exploration(failed.name)
    goes_on = commands.start("-c", "import time; time.sleep(99)")
    began = time.monotonic()
    assert goes_on.wait(0.3) is None
    assert time.monotonic() - began >= 0.3
    assert goes_on._process.poll() is None
    files = goes_on._files
    goes_on.stop()
    assert (goes_on._process.returncode, files.exists()) == (-15, False)


class Started:
    """In place of a command that was started."""

    name, job_id = "command-7", None

    def __init__(self, *arguments: str, stdin: str = "", folder: Path | None = None) -> None:
        self.arguments, self.stdin, self.folder = arguments, stdin, folder

    def wait(self, seconds: float) -> dict[str, Any] | None:
        return {"waited": seconds} if seconds >= 1 else None


@pytest.mark.parametrize(
    ("service", "device", "started"),
    [
        (False, None, ("explore", "-", "--json")),
        (False, "cpu", ("explore", "-", "--json", "--device", "cpu")),
        (True, "cpu", ("explore", "-", "--json", "--device", "cpu")),
        (True, None, None),
    ],
)
def test_an_agent_explores_here_unless_a_service_is_named_and_no_device(
    monkeypatch: pytest.MonkeyPatch, service: bool, device: str | None, started: tuple[str, ...] | None
) -> None:
    commands, tools = list[Started](), dict[str, Callable[..., Any]]()

    def start(*arguments: str, **others: Any) -> Started:
        commands.append(Started(*arguments, **others))
        return commands[-1]

    def last() -> Started:
        return commands[-1]

    async def submit(_: Any, given: Callable[[], dict[str, Any]], seconds: float, __: Any) -> dict[str, Any]:
        return {"submitted": (given(), seconds)}

    monkeypatch.setattr(server, "_submit", submit)
    here: Any = SimpleNamespace(add_tool=lambda tool: tools.setdefault(tool.__name__, tool))
    server.add_local_tools(here, SimpleNamespace(start=start), service=service)  # type: ignore[arg-type]  # all it asks
    expected = {**TINY, "batch_size": 48}
    answer = anyio.run(tools["explore"], TINY, {"batch_size": 48}, device, 5.0)
    if started is None:
        assert (answer, commands) == ({"submitted": (expected, 5.0)}, [])
        return
    (command,) = commands
    assert (answer, command.arguments, json.loads(command.stdin)) == ({"waited": 5.0}, started, expected)
    starting = {"job": {"id": "command-7", "state": "starting"}, "certainty": None}
    assert tools["tune"](["python", "x.py"], ["--batch-size", "8"], "/data", 0.0) == starting
    assert last().arguments == ("tune", "--json", "--batch-size", "8", "--", "python", "x.py")
    assert last().folder == Path("/data")
    assert anyio.run(tools["explore"], TINY, None, "cpu") == tools["tune"](["true"]) == {"waited": 30.0}
    assert (last().arguments, last().folder) == (("tune", "--json", "--", "true"), None)
    assert tools["doctor"]() == {"waited": math.inf}
    assert last().arguments == ("doctor", "--json")


def test_a_tool_of_this_machine_is_told_a_command_and_how_long_to_wait() -> None:
    tools = MCPServer("bexp")
    server.add_local_tools(tools, SimpleNamespace(start=Started), service=False)  # type: ignore[arg-type]  # all it asks

    async def conversation(_: Client, call: Call) -> None:
        for name, given in (("tune", {"command": ["true"]}), ("explore", {"config": TINY})):
            assert await call(name, **given, wait_seconds=3600) == {"waited": 3600}
            for seconds in (-1, 3601):
                assert "wait_seconds" in await call(name, **given, wait_seconds=seconds)
        assert "command" in await call("tune", command=[])

    talk(tools, conversation)


@pytest.mark.parametrize("url", [None, "http://h:1"])
def test_over_stdio_explorations_go_to_the_service_that_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    did: list[Any] = []
    monkeypatch.setattr(server, "build_server", lambda *_: SimpleNamespace(run=did.append))
    monkeypatch.setattr(server, "add_local_tools", lambda *_, service: did.append(service))
    monkeypatch.delenv("BEXP_API_URL", raising=False)
    assert CliRunner().invoke(app, ["mcp"], env={"BEXP_API_URL": url}).exit_code == 0
    assert did == [url is not None, "stdio"]
