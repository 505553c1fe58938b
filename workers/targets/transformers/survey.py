"""Tries every causal language model type of the installed transformers at a tiny size on the CPU.

`python -m bexp.workers.targets.transformers.survey --out docs/models.json` writes the rows and docs/models.md.
Rows that the file has for the same version are kept unless `--again` is given, so an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch

from bexp.workers.targets.transformers.config import library_version
from bexp.workers.targets.transformers.survey_document import render

_DEADLINE_SECONDS = 180.0
_START_SECONDS = 120.0  # importing torch and transformers on a busy machine


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the survey. See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/models.json"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=_DEADLINE_SECONDS, help="seconds for one model type")
    parser.add_argument("--again", nargs="*", default=None, help="types to try again; none named: all")
    options = parser.parse_args(arguments)
    document = _earlier(options.out)
    rows: dict[str, Any] = document["models"]
    types = model_types()
    again = set(types if options.again == [] else options.again or ())
    waiting = [name for name in types if name not in rows or name in again]

    def keep(row: dict[str, Any]) -> None:
        rows[row.pop("model_type")] = row
        options.out.write_text(json.dumps(document | {"models": dict(sorted(rows.items()))}, indent=1) + "\n")
        sys.stderr.write(f"{len(rows)} of {len(types)}\n")

    survey(waiting, options.processes, options.deadline, keep)
    options.out.with_suffix(".md").write_text(render(json.loads(options.out.read_text())))


def model_types() -> list[str]:
    """Every type of the installed library's causal language model mapping, in order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415 - transformers is optional

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def survey(types: Sequence[str], processes: int, deadline: float, keep: Callable[[dict[str, Any]], None]) -> None:
    """Tries `types` in `processes` children; `keep` gets each row. A child that is late or dies is replaced."""
    waiting: Queue[str] = Queue()
    for name in types:
        waiting.put(name)
    lock = threading.Lock()

    def serve() -> None:
        child = _Child()
        try:
            while True:
                try:
                    name = waiting.get_nowait()
                except Empty:
                    return
                row = child.ask(name, deadline)
                with lock:
                    keep(row)
        finally:
            child.stop()

    threads = [threading.Thread(target=serve) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Child:
    """A process that tries one type after another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, name: str, deadline: float) -> dict[str, Any]:
        """The row of type `name`; a row that says so if the child takes longer than `deadline` seconds or dies."""
        allowed = deadline
        if self._process is None:
            self._process = self._start()
            allowed += _START_SECONDS
        assert self._process.stdin is not None, "the child is started with pipes"
        self._process.stdin.write(f"{name}\n".encode())
        self._process.stdin.flush()
        line = self._line(time.monotonic() + allowed)
        if line:
            row: dict[str, Any] = json.loads(line)
            return row
        status = self._process.poll()
        self.stop()
        reason = f"took longer than {deadline:.0f} s" if status is None else f"the process ended with status {status}"
        return {"model_type": name, "status": "not", "reason": reason}

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None

    def _line(self, until: float) -> bytes:
        """A whole line of the child's output; empty if it is late or gone."""
        assert self._process is not None and self._process.stdout is not None, "the child is started with pipes"
        stream = self._process.stdout
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([stream], [], [], left)
            if ready:
                return stream.readline()
        return b""

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "bexp.workers.targets.transformers.survey_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )


def _earlier(path: Path) -> dict[str, Any]:
    """The document at `path` if it is of the installed versions, else an empty one."""
    versions = {"transformers": library_version(), "torch": torch.__version__}
    if path.exists():
        document: dict[str, Any] = json.loads(path.read_text())
        if document["versions"] == versions:
            return document
    return {"versions": versions, "models": {}}


if __name__ == "__main__":
    main()
