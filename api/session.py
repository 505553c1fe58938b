"""One exploration for a program on this machine: `python -m bexp.api.session`, which `bexp.explore_config` starts.

The first line of stdin is JSON: the `document` of a request, and the `device` of the worker or null. Each line of
stdout is JSON as well: the `exploration`, then each `event`, and at the end the `exploration` with its `trials` and its
`result`, or an `error`. When stdin is closed, the exploration is cancelled unless it has ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from bexp.api.cli.connection import open_stored
from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.cli.local_run import LocalRun
from bexp.api.cli.options import device_kind
from bexp.client.errors import ProblemError, ServiceError
from bexp.client.explorations import Result
from bexp.explorer.formats.document import FormatError, describe_problem
from bexp.explorer.formats.request import parse_request
from bexp.storage.ids import new_job_id


def main() -> ExitCode:
    """Run the exploration; return the exit status."""
    try:
        _run(json.loads(sys.stdin.readline()))
    except FormatError as error:
        _tell(error="; ".join(map(describe_problem, error.errors)))
        return ExitCode.USAGE
    except (CommandError, ServiceError, ProblemError) as error:
        _tell(error="; ".join(str(error).splitlines()))
        return ExitCode.SERVICE
    return ExitCode.ANSWER


def _run(asked: dict[str, Any]) -> None:
    device = asked["device"]
    kind = device_kind(device)
    request = parse_request(asked["document"], overrides={} if kind is None else {"device_kind": kind})
    with LocalRun(request, new_job_id(), device, None) as run, open_stored() as stored:
        job = stored.submit(request, job_id=run.job_id, own_worker=run.worker_name)
        _tell(exploration=job.model_dump(mode="json"))
        closed = threading.Event()
        threading.Thread(target=_await_end_of_stdin, args=(closed,), daemon=True).start()
        with run.cancelling(stored):
            for event in stored.events(job.id, on_idle=lambda: run.check(stored), cancelled=closed.is_set):
                _tell(event=event.model_dump(mode="json"))
        ended = stored.get(job.id)
        if not ended.is_final:
            run.cancel(stored)
            return
        result = Result.of(ended)
        _tell(
            exploration=ended.model_dump(mode="json"),
            trials=[trial.model_dump(mode="json") for trial in stored.trials(job.id)],
            result=None if result is None else result.model_dump(mode="json"),
        )


def _await_end_of_stdin(closed: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    closed.set()


def _tell(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
