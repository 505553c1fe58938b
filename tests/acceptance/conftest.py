"""The product as a person runs it: commands as processes, on this machine's CPU, with an empty home."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from bexp.api.cli import app
from tests.waits import PATIENCE_SECONDS, wait_until

TINY = {
    "model": {
        "name": "tiny",
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 128,
        "vocab_size": 256,
        "seq_length": 32,
        "dtype": "float32",
    },
    "batch_size": 8,
    "micro_batch_size": [1, 2, 4],
    "recompute": ["none"],
    "bta": {"enable": False},
    "budget": {"max_trials": 2, "confidence_target": 99},
}


class Machine:
    """A folder with a home and a configuration, and the processes started there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("BEXP_")}
        self.environment |= {
            "XDG_DATA_HOME": str(folder / "data"),
            "TMPDIR": str(folder),
            "BEXP_LOCK_DIRECTORY": str(folder),  # other machines are none of this one's concern
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        self.database_url = f"sqlite:///{folder / 'data' / 'bexp' / 'bexp.db'}"
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start a command; what it prints goes to files named after its number."""
        number = len(self._started)
        with (self.folder / f"{number}.out").open("w") as out, (self.folder / f"{number}.err").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "bexp.api.cli", *map(str, arguments)],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
            )
        self._started.append(process)
        return process

    def out(self, process: subprocess.Popen[str]) -> str:
        """What `process` has printed so far."""
        return (self.folder / f"{self._started.index(process)}.out").read_text()

    def err(self, process: subprocess.Popen[str]) -> str:
        """What `process` has said so far."""
        return (self.folder / f"{self._started.index(process)}.err").read_text()

    def run(self, *arguments: str | Path, code: int = 0) -> str:
        """Run a command to its end and return what it printed."""
        process = self.start(*arguments)
        assert process.wait(PATIENCE_SECONDS) == code, self.err(process)
        return self.out(process)

    def ask(self, *arguments: str | Path) -> str:
        """Return what a command prints that only reads, and so needs no process of its own."""
        done = CliRunner().invoke(app, [*map(str, arguments)], env=self.environment)
        assert done.exit_code == 0, done.output
        return done.stdout

    def configure(self, **changes: object) -> Path:
        """Write a configuration."""
        path = self.folder / "tiny.yaml"
        path.write_text(yaml.safe_dump({**TINY, **changes}))
        return path

    def end(self) -> None:
        """End what still runs."""
        for process in self._started:
            if process.poll() is None:
                process.terminate()
        for process in self._started:
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine of its own."""
    machine = Machine(tmp_path)
    try:
        yield machine
    finally:
        machine.end()


def await_url(machine: Machine, server: subprocess.Popen[str]) -> str:
    """Return the address that a server announces, once the whole line is there."""
    line = re.compile(r"serving (http://\S+)\n")
    wait_until(lambda: line.search(machine.err(server)), "the API does not start")
    (found,) = line.findall(machine.err(server))
    return str(found)


def profilers_of(process: psutil.Process) -> list[psutil.Process]:
    """The profiler processes below `process`."""
    return [child for child in process.children(recursive=True) if "bexp.workers.profiler" in command_of(child)]


def command_of(process: psutil.Process) -> list[str]:
    """The command line of `process`; of one that has just ended, nothing."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def await_gone(processes: list[psutil.Process], seconds: float) -> None:
    """Wait until none of `processes` is left."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive
