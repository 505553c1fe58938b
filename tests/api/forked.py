"""Commands of `bexp` that are forked from a process which has imported what a service needs; that takes seconds."""

from __future__ import annotations

import json
import os
import resource
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TextIO

from tests.chaos.fork_server import ForkedProcess, shared_server
from tests.waits import PATIENCE_SECONDS

IMPORTED = (
    "bexp.api.cli",
    "bexp.api.serve",
    "sqlalchemy.dialects.sqlite.pysqlite",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.h11_impl",
    *(("bexp.api.agents.http",) if find_spec("mcp") else ()),
)


@dataclass(frozen=True, slots=True)
class Forked:
    """A service, its URL, what it said before that, and what it prints."""

    process: ForkedProcess
    url: str
    said: str
    printed: TextIO

    def end(self, sig: int = signal.SIGTERM) -> tuple[int, str]:
        """Tell it to end; return its exit status, and what it printed after its URL."""
        self.process.send_signal(sig)
        rest = self.printed.read()
        return self.process.wait(PATIENCE_SECONDS), rest


@contextmanager
def forked(*arguments: str, open_files: int | None = None, **variables: str) -> Iterator[Forked]:
    """Run `bexp serve` or `bexp mcp --http` on a free port until its URL is printed; kill it at the end.

    Args:
        arguments: of the command line.
        open_files: how many the process may have open.
        variables: of its environment, which has no other one of bexp.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BEXP_")}
    given = json.dumps({"environment": kept | variables, "open_files": open_files})
    reads, writes = os.pipe()
    process = shared_server(*IMPORTED).start(__name__, given, *arguments, "--port", "0", output=writes)
    os.close(writes)
    with os.fdopen(reads) as printed:
        try:
            said = ""
            while not (line := printed.readline()).startswith("serving "):
                assert line, said
                said += line
            yield Forked(process, line.split()[1], said, printed)
        finally:
            process.kill()
            process.wait(PATIENCE_SECONDS)


def main() -> None:
    """Become the command."""
    given = json.loads(sys.argv.pop(1))
    os.environ.clear()
    os.environ.update(given["environment"])
    if given["open_files"] is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (given["open_files"], given["open_files"]))
    runpy.run_module("bexp.api.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
