"""`python -m bexp.workers.profiler.distributed.rank`: one rank of a group, which profiles one device."""

from __future__ import annotations

import argparse
import gc

from bexp.workers.profiler.parent import die_with_parent


def main() -> int:
    """Answer the coordinator's commands until the group ends."""
    parser = argparse.ArgumentParser(prog="python -m bexp.workers.profiler.distributed.rank")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--devices", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    gc.disable()  # collections amid an import visit all objects, and free next to nothing
    from bexp.workers.profiler.distributed.process_groups import serve_rank  # noqa: PLC0415 - it imports torch

    gc.enable()
    return serve_rank(arguments.rank, arguments.devices.split(","), arguments.port)


if __name__ == "__main__":
    raise SystemExit(main())
