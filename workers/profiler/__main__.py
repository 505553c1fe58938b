"""`python -m bexp.workers.profiler` owns one device. A worker starts it; nobody starts it by hand."""

from __future__ import annotations

import gc

from bexp.workers.profiler.parent import connect_to_parent


def main() -> int:
    """Answer the parent's commands until the parent ends, or until this process is no longer fit to measure."""
    parent = connect_to_parent("bexp.workers.profiler")
    gc.disable()  # collections amid an import visit all objects, and free next to nothing
    from bexp.workers.profiler.device import serve_device  # noqa: PLC0415 - it imports torch, which takes seconds

    gc.enable()
    return serve_device(parent)


if __name__ == "__main__":
    raise SystemExit(main())
