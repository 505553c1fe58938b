"""One exploration for a program on this machine: `python -m bexp.api.session`, which `bexp.explore_config` starts.

The first line of stdin is JSON: the `document` of a request, and the `device` of the worker or null. The first line of
stdout is JSON, too: the `url` of the service and the `id` of the exploration, or the `error`. A second line has the
`error` if the worker fails later. When stdin is closed, the exploration is cancelled unless it has ended.
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Any

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.cli.explore import cancel, check_target, open_embedded
from bexp.api.cli.options import device_kind
from bexp.api.client import ProblemError, ServiceError
from bexp.explorer.formats.document import FormatError, describe_problem
from bexp.explorer.formats.request import parse_request

CHECK_SECONDS = 0.5


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
    check_target(request, device)
    with open_embedded(request, lambda client: client.submit(request), device) as (client, job, watchdog):
        _tell(url=client.url, id=job.id)
        while not _is_closed():
            watchdog()
        if not client.get(job.id).is_final:
            cancel(client, job.id)


def _is_closed() -> bool:
    """Wait a while for stdin; return whether it has been closed."""
    ready, _, _ = select.select([sys.stdin], [], [], CHECK_SECONDS)
    return bool(ready) and not os.read(sys.stdin.fileno(), 4096)


def _tell(**message: str) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
