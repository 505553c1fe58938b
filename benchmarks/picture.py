"""Draws docs/images/live-view.svg: the terminal near the end of a search that is replayed on a recorded table.

The lines and the live view are those of `bexp explore`; the clock is that of the recording.

python -m benchmarks.picture
"""

from __future__ import annotations

import io
import sys
from datetime import UTC, datetime, timedelta

from rich.console import Console
from rich.live import Live

from benchmarks.environment import ROOT
from benchmarks.recording_file import covered_request
from benchmarks.result_tables import RESULTS
from bexp.api.cli.following import LiveOutput
from bexp.api.live import LiveView
from bexp.explorer.records.event import Event, EventCode
from bexp.explorer.search.explore import explore
from bexp.storage.changes import claim_event
from bexp.workers.replay.profiler import RecordedDevice, VirtualClock
from bexp.workers.replay.recording import Recording

TABLE = RESULTS / "tables" / "olmoe-zipf.jsonl"
PICTURE = ROOT / "docs" / "images" / "live-view.svg"
WIDTH, HEIGHT = 100, 50
AT = datetime(2026, 1, 1, tzinfo=UTC)
"""Nothing of the picture depends on the moment it was drawn at."""


def main() -> int:
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw())
    return 0


def draw() -> str:
    """The terminal as SVG, at the last recommendation that was made before whole models are run."""
    recording = Recording.read(TABLE)
    request, hardware = covered_request(recording), recording.header.report.hardware
    clock = VirtualClock()
    view = LiveView("0123456789abcdef", request, lambda: AT + timedelta(seconds=clock()))
    console = Console(
        record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    output = LiveOutput(Live(view, console=console, auto_refresh=False), view)
    output.show(Event(seq=1, at=AT, **claim_event(1, "recorded", hardware.describe(), "bexp", 0).model_dump()))
    seq = 1
    for step in explore(
        request, recording.header.report, RecordedDevice(recording, seed=request.seed, clock=clock), clock=clock
    ):
        for draft in step.events:
            if draft.code is EventCode.WARNING or draft.code.ends_job:
                continue
            seq += 1
            output.show(Event(seq=seq, at=AT + timedelta(seconds=clock()), **draft.model_dump()))
    console.print(view)
    title = f"bexp explore: {request.shapes.name}, recorded on {hardware.device_name}"
    return console.export_svg(title=title, unique_id="live-view")


if __name__ == "__main__":
    sys.exit(main())
