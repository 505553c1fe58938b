"""The service's search, for a step that this process measures.

It runs in an isolated process, because a trainer's folder may have packages of the same names as the service's.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import site
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import IO, Any

from bexp.child_process import PACKAGES_FOLDER
from bexp.step.results import SizeResult

MODULE = "bexp.explorer.search.step_exploration"
REPLY_SECONDS = 60.0
"""The longest that the search may take to choose a size. It takes 0.1 s on a quiet machine."""
END_SECONDS = 5.0
"""The longest that a search may take to end once it has closed its output."""
_CODE = f"import sys; sys.path[:0] = sys.argv[1:]; from {MODULE} import main; raise SystemExit(main())"


class SearchError(Exception):
    """The search cannot be used, or not any more; the message says why."""


class ChildSearch:
    """The service's search in an isolated process: it imports nothing from the trainer's folder.

    `python -I` ignores the working directory, PYTHONPATH, and the user's site-packages.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        # Only a folder that has the search is added. A trainer's may have a copy of `bexp` and its own `explorer`.
        here = PACKAGES_FOLDER.joinpath(*MODULE.split(".")).with_suffix(".py").is_file()
        folders = [str(PACKAGES_FOLDER)] if here and str(PACKAGES_FOLDER) not in site.getsitepackages() else []
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _CODE, *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                text=True,
            )
        except OSError as error:
            self._errors.close()
            raise SearchError(f"it does not start: {error}") from error
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="bexp-search", daemon=True).start()
        self._description = description
        self.answer: Mapping[str, Any] = {}
        """Size, sequences per second, confidence, and which sizes cannot fit; there at the end."""

    def start(self) -> int | None:
        """Return the first size to measure; null if the search is at its end.

        Raises SearchError if the search fails, as `tell` and `stop` do.
        """
        return self._exchange(self._description)

    def tell(self, result: SizeResult) -> int | None:
        """Return the size to measure after `result`; null if the search is at its end."""
        return self._exchange(result.to_json())

    def stop(self) -> Mapping[str, Any]:
        """End the search early; return its answer with what it knows by now."""
        self._exchange(None)
        return self.answer

    def _exchange(self, message: Mapping[str, Any] | None) -> int | None:
        try:
            assert self._process.stdin is not None, "it is a pipe"
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            found = json.loads(self._lines.get(timeout=REPLY_SECONDS))
        except (OSError, ValueError, queue.Empty) as error:
            raise SearchError(self._trouble(error)) from error
        if "answer" in found:
            self.answer = found["answer"]
            return None
        return int(found["measure"])

    def __enter__(self) -> ChildSearch:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def _trouble(self, error: Exception) -> str:
        if isinstance(error, queue.Empty):
            return f"it chose no size within {REPLY_SECONDS:g} s"
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it sent a reply that cannot be read"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"it ended with exit status {self._process.returncode}"
