"""What is seen on a terminal."""

from __future__ import annotations

import io
import re
from datetime import UTC, datetime

from rich.console import Console

from api.live import LiveView
from explorer.records.event import Event, EventCode
from tests.cli.samples import BASE, EVENTS, GIB, RECOMMENDATION, REQUEST, event


def render(view: LiveView, width: int = 80) -> str:
    file = io.StringIO()
    Console(width=width, file=file).print(view)
    return file.getvalue()


def view_of(*events: Event) -> LiveView:
    view = LiveView("job1", REQUEST)
    for one in events:
        view.show(one)
    return view


def test_everything_that_is_known_is_seen() -> None:
    failed = event(5, EventCode.INFEASIBLE, candidate={"micro_batch_size": 2}, outcome="out_of_memory")
    text = render(view_of(*EVENTS[:4], failed))
    assert "tiny  job1  1 trial" in text
    assert "best so far  micro_batch_size 4  11,500 tokens/s  1.23x base  confidence 87" in text
    rows = re.findall(r"^(\d+) (.*?)\s*$", text, re.MULTILINE)
    assert [(size, row.split()[-1]) for size, row in rows] == [("1", "10,000"), ("2", "memory"), ("4", "12,346")]
    assert rows[0][1].count("━") < rows[2][1].count("━")
    assert "memory at the peak: 4.8 GiB (59.4% of 8.0 GiB)" in text
    assert "optimizer states 2.0 GiB" in text
    assert "something" in text  # the last event


def test_memory_far_below_the_limit_is_drawn_against_itself() -> None:
    small = RECOMMENDATION.model_copy(update={"memory_limit_bytes": 1000 * GIB})
    text = render(view_of(event(1, EventCode.RECOMMENDATION, recommendation=small.model_dump(mode="json"))))
    assert text.count("█") > 70


def test_remaining_time_counts_down_to_the_budget() -> None:
    started = Event(seq=1, at=datetime.now(UTC), code=EventCode.STARTED, message="started")
    text = render(view_of(started))
    assert re.search(r"0:0[01] passed, up to about 0:(09|10) left", text)
    text = render(view_of(event(1, EventCode.STARTED)))
    assert "comparing and checking" in text
    assert "left" not in render(view_of(event(1, EventCode.STARTED), event(2, EventCode.SUCCEEDED)))


def test_another_variant_starts_an_empty_chart() -> None:
    text = render(view_of(*EVENTS[:4], event(5, EventCode.VARIANT, num_query_groups=2)))
    assert "tokens/s by micro_batch_size" not in text
    assert "best so far" not in text


def test_a_narrow_terminal_and_messages_with_markup_do_no_harm() -> None:
    odd = event(1, EventCode.WARNING, "[red]not markup[/] " * 20)
    trial = event(2, EventCode.TRIAL, candidate=BASE.model_dump(mode="json"), tokens_per_second=None)
    assert "[red]not markup" in render(view_of(odd, trial, EVENTS[3], odd), width=30)
