"""`python -m workers.profiler.distributed` owns a group of devices. A worker starts it; nobody starts it by hand."""

from __future__ import annotations

from workers.profiler.parent import connect_to_parent


def main() -> int:
    """Start a rank for each device and answer for them, until one of them or the parent ends."""
    parent = connect_to_parent("workers.profiler.distributed")
    from workers.profiler.distributed.launch import serve_group  # noqa: PLC0415 - it imports torch, which takes seconds

    return serve_group(parent)


if __name__ == "__main__":
    raise SystemExit(main())
