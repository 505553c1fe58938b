"""Draws docs/images/live-view.svg: the real live view at the end of a search that is replayed on a recorded table.

python -m benchmarks.docs.picture
"""

from __future__ import annotations

import io
import sys
from datetime import UTC, datetime

from rich.console import Console

from api.live import LiveView
from benchmarks.docs.results import RESULTS, ROOT
from explorer.records.event import Event, EventCode
from explorer.search.explore import explore
from workers.replay.device import RecordedDevice, VirtualClock
from workers.replay.recording import Recording

TABLE = RESULTS / "tables" / "olmoe-zipf.jsonl"
PICTURE = ROOT / "docs" / "images" / "live-view.svg"
WIDTH = 104
AT = datetime(2026, 1, 1, tzinfo=UTC)
"""Nothing of the picture depends on the moment it was drawn at."""


def main() -> int:
    """Write the picture."""
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw())
    return 0


def draw() -> str:
    """The live view as SVG."""
    recording = Recording.read(TABLE)
    request = recording.covered_request()
    view = LiveView("a recording, replayed", request)
    view.show(Event(seq=1, at=AT, code=EventCode.STARTED, message="started"))
    clock = VirtualClock()
    device = RecordedDevice(recording, seed=request.seed, clock=clock)
    seq = 1
    for step in explore(request, recording.header.report, device, clock=clock):
        for draft in step.events:
            seq += 1
            view.show(Event(seq=seq, at=AT, **draft.model_dump()))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(view)
    title = f"bexp explore: {request.model.name}, recorded on {recording.header.report.hardware.device_name}"
    return console.export_svg(title=title, unique_id="live-view")


if __name__ == "__main__":
    sys.exit(main())
