"""Commands of bexp in processes of their own, which outlast the call of a tool and end with the server."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.child_process import module_command, safe_environment

GRACE_SECONDS = 15.0
POLL_SECONDS = 0.1
LAST_LINES = 8
_EXPLORATION = re.compile(r"^exploration (\S+), kept in ", re.MULTILINE)


class Command:
    """One command. Its stdout is a JSON document if it ends well, and its stderr names its exploration."""

    def __init__(self, name: str, arguments: Sequence[str], stdin: str = "", folder: Path | None = None) -> None:
        self.name = name
        self._files = Path(tempfile.mkdtemp(prefix="bexp-"))
        try:
            self._process = self._begin(arguments, stdin, folder)
        except OSError:
            shutil.rmtree(self._files, ignore_errors=True)
            raise

    def _begin(self, arguments: Sequence[str], stdin: str, folder: Path | None) -> subprocess.Popen[bytes]:
        (self._files / "in").write_text(stdin)
        with (self._files / "in").open() as given, self._out.open("w") as out, self._err.open("w") as err:
            return subprocess.Popen(
                module_command("bexp.api.cli", *arguments),
                stdin=given,
                stdout=out,
                stderr=err,
                cwd=folder,
                env=safe_environment(os.environ),
                start_new_session=True,
            )

    @property
    def _out(self) -> Path:
        return self._files / "out"

    @property
    def _err(self) -> Path:
        return self._files / "err"

    @property
    def job_id(self) -> str | None:
        """The exploration that it follows; None while it has none."""
        match = _EXPLORATION.search(self._err.read_text(errors="replace"))
        return match[1] if match else None

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """Return its document; None if it still runs after `seconds`.

        Raises CommandError with its last lines if it has failed without a document.
        """
        deadline = time.monotonic() + seconds
        while self._process.poll() is None:
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_SECONDS)
        if text := self._out.read_text():
            document: dict[str, Any] = json.loads(text)
            return document
        raise CommandError(ExitCode.SERVICE, *self._err.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def stop(self) -> None:
        """End it, if it runs; its exploration is cancelled."""
        with suppress(subprocess.TimeoutExpired):
            self._process.terminate()
            self._process.wait(GRACE_SECONDS)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._files, ignore_errors=True)


class Commands:
    """The commands that a server has started; they end with the context."""

    def __init__(self) -> None:
        self._started: dict[str, Command] = {}
        self._numbers = itertools.count(1)

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        for command in self._started.values():
            command.stop()

    def start(self, *arguments: str, stdin: str = "", folder: Path | None = None) -> Command:
        """Start a command."""
        name = f"command-{next(self._numbers)}"
        self._started[name] = Command(name, arguments, stdin, folder)
        return self._started[name]

    def exploration(self, given: str) -> str:
        """Return the id of the exploration of the command with this name; another text is returned as it is.

        Raises CommandError if the command has none, with its last lines if it has failed.
        """
        command = self._started.get(given)
        if command is None:
            return given
        if (job_id := command.job_id) is not None:
            return job_id
        command.wait(0.0)
        raise CommandError(ExitCode.NO_ANSWER, f"{given} has begun no exploration yet; ask again")
