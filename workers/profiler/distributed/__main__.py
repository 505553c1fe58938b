"""`python -m bexp.workers.profiler.distributed` owns a group of devices. Only a worker starts it."""

from __future__ import annotations

from bexp.workers.profiler.parent import connect_to_parent


def main() -> int:
    """Start a rank for each device and answer for them, until one of them or the parent ends."""
    parent = connect_to_parent("bexp.workers.profiler.distributed")
    from bexp.workers.profiler.distributed.coordinator import serve_group  # noqa: PLC0415 - it imports torch, which takes seconds

    return serve_group(parent)


if __name__ == "__main__":
    raise SystemExit(main())
