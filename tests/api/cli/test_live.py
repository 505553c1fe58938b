"""What is seen on a terminal."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.live import Live

from bexp.api.cli import following
from bexp.api.cli.following import LiveOutput
from bexp.api.live import LiveView, RateChart
from bexp.api.local_worker import WorkerEndedError
from bexp.api.stored import StoredExplorations
from bexp.client.errors import ServiceError
from bexp.client.explorations import Exploration
from bexp.explorer.records.event import Event, EventCode
from bexp.storage.queue import Queue
from tests.api.cli.samples import BASE, EVENTS, RECOMMENDATION, REQUEST, event, job_document

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def render(view: LiveView, width: int = 80) -> str:
    file = io.StringIO()
    Console(width=width, file=file).print(view)
    return file.getvalue()


def view_of(*events: Event) -> LiveView:
    view = LiveView("job1", REQUEST, clock=lambda: NOW)
    for one in events:
        view.show(one)
    return view


WHILE_IT_RUNS = """\
tiny  job1  2 trials  0:04 passed, about 0:04 left
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
something

best so far  11,000 tokens/s per device, 1.23x base, confidence 30 (target 60)
             micro_batch_size=4 bta_tile=2 recompute=none attention=flash
             experts=grouped_mm
"""
CHART = """
composed tokens/s by micro_batch_size, as last measured, bars begin at 8,500
1 ██████████                                          9,000
2 ██████████████████████████████                     10,000
4 ██████████████████████████████████████████████████ 11,000 ◀ best so far
8 out of memory

memory at the peak, as composed: 4.8 GiB (59.4% of 8.0 GiB)
██████████████████████████████████████████████░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░
parameters 1.0 GiB     gradients 1.0 GiB    optimizer states 2.0 GiB
activations 512.0 MiB  transient 256.0 MiB
"""
AT_THE_END = f"tiny  job1  2 trials  0:04\n{'━' * 80}\n"


def test_the_view_is_this_picture() -> None:
    best = RECOMMENDATION.model_copy(update={"confidence": 30, "tokens_per_second": 11_000.0, "whole_model": None})
    rates = {1: 9_000, 2: 10_000.0}
    events = [
        started_ago(4),
        *(event(2, EventCode.TRIAL, candidate={"micro_batch_size": n}, tokens_per_second=r) for n, r in rates.items()),
        event(4, EventCode.INFEASIBLE, candidate={"micro_batch_size": 8}, outcome="out_of_memory"),
        event(5, EventCode.RECOMMENDATION, recommendation=best.model_dump(mode="json")),
    ]
    assert [line.rstrip() for line in render(view_of(*events)).splitlines()] == (WHILE_IT_RUNS + CHART).splitlines()
    ended = Event(seq=6, at=NOW, code=EventCode.SUCCEEDED, message="done")
    expected = (AT_THE_END + CHART).replace("best so far", "recommended")
    assert [line.rstrip() for line in render(view_of(*events, ended)).splitlines()] == expected.splitlines()


def test_before_the_start_and_without_a_request_there_is_no_time_to_tell() -> None:
    ended = view_of(event(1, EventCode.QUEUED), event(2, EventCode.CANCELLED))
    assert render(ended).startswith("tiny  job1  0 trials\n")
    unread = LiveView("job1", None, clock=lambda: NOW)  # another version has written the request
    for one in (event(1, EventCode.QUEUED), started_ago(5), EVENTS[3]):
        unread.show(one)
        assert render(unread).splitlines()[0].rstrip() == "exploration  job1  0 trials"
    assert re.search(r"confidence 87 out of 100$", render(unread), re.MULTILINE)
    assert "  0:00 passed" in render(view_of(started_ago(-9))), "the clock of another machine is ahead"


def test_what_has_no_rate_or_no_size_is_in_no_bar() -> None:
    candidate = {"micro_batch_size": 2}
    without = [event(2, EventCode.TRIAL, candidate=candidate, tokens_per_second=None), event(3, EventCode.TRIAL)]
    assert "tokens/s" not in render(view_of(*without, event(4, EventCode.INFEASIBLE)))
    failed = render(view_of(event(2, EventCode.INFEASIBLE, candidate=candidate, tokens_per_second=None)))
    assert re.search(r"^2 infeasible *$", failed, re.MULTILINE)


def test_the_recommended_bar_is_green_and_a_failure_red() -> None:
    best = RECOMMENDATION.model_dump(mode="json")
    events = [event(2, EventCode.TRIAL, candidate={"micro_batch_size": n}, tokens_per_second=9e3) for n in (2, 8)]
    failed = event(4, EventCode.INFEASIBLE, candidate={"micro_batch_size": 16})
    file = io.StringIO()
    view = view_of(*events, failed, event(5, EventCode.RECOMMENDATION, recommendation=best))
    Console(width=80, file=file, force_terminal=True, color_system="standard").print(view)
    colours = re.findall(r"^ ?(\d+) \x1b\[(\d+)m[█i]", file.getvalue(), re.MULTILINE)
    assert colours == [("2", "36"), ("4", "32"), ("8", "36"), ("16", "31")]


@pytest.mark.parametrize(
    ("seconds", "trials", "confidence", "share"),
    [(4, 1, 0, 0.4), (0, 2, 15, 0.25), (0, 0, 45, 0.75), (11, 8, 60, 0.99), (0, 0, 0, 0.0)],
)
def test_the_bar_grows_with_the_confidence_or_with_what_is_used_of_the_budget(
    seconds: float, trials: int, confidence: int, share: float
) -> None:
    view = view_of(
        started_ago(seconds),
        *(event(2, EventCode.TRIAL) for _ in range(trials)),
        *([confident(confidence)] if confidence else []),
    )
    assert view._bar().completed == pytest.approx(share)
    assert f"  {trials} trial{'' if trials == 1 else 's'}  " in render(view)
    view.show(event(9, EventCode.FAILED))
    assert view._bar().completed == 1


@pytest.mark.parametrize(
    ("rates", "begin"),
    [
        ((49.0, 100.0), None),  # they differ enough from 0
        ((50.0, 100.0), "30"),
        ((90.0, 100.0), "87"),
        ((1990.0, 2000.0), "1,987"),
        ((999_400.0, 999_500.0), "999,300"),  # differences below a thousandth have no finer step
        ((1_000_600.0, 1_000_700.0), "1,000,000"),
        ((100.0, 100.0), None),
    ],
)
def test_bars_begin_at_a_round_number_below_the_lowest_rate(rates: tuple[float, ...], begin: str | None) -> None:
    found = re.search(r", bars begin at (\S+)$", drawn(dict(enumerate(rates, 1))), re.MULTILINE)
    assert (None if found is None else found[1]) == begin


def test_a_bar_is_as_long_as_its_rate_to_an_eighth_of_a_cell() -> None:
    chart = drawn({1: 1.0, 2: 25.3, 3: 100.0, 4: 0.0})
    assert re.findall(r"^(\d) (\S+)", chart, re.MULTILINE) == [
        ("1", "▌"),
        ("2", 12 * "█" + "▋"),
        ("3", 50 * "█"),
        ("4", "▏"),
    ]


def test_what_is_left_out_of_a_chart_is_counted() -> None:
    rates = {size: float(size) for size in range(1, 31)}
    assert ", 18 more 19 " in " ".join(drawn(rates, 12).split())
    assert "more" not in drawn(rates, 30)


def drawn(rates: dict[int, float], most: int = 12) -> str:
    """The chart of sizes with their rates."""
    chart = RateChart()
    for size, rate in rates.items():
        chart.note_rate(size, {"micro_batch_size": size}, rate)
    text = io.StringIO()
    Console(width=80, file=text).print(*chart.draw(80, most, final=True))
    return text.getvalue()


def bars(rates: dict[int, float], most: int = 12) -> dict[int, int]:
    """The length of the bar of each size that is drawn."""
    found = re.findall(r"^ *(\d+) (█+)", drawn(rates, most), re.MULTILINE)
    return {int(size): len(bar) for size, bar in found}


def test_the_fastest_sizes_are_drawn_where_there_is_no_room_for_all() -> None:
    assert list(bars({size: float(size) for size in range(1, 31)}, 12)) == list(range(19, 31))
    chart = RateChart()
    for size in range(10, 20):
        chart.note_failure(size, "out_of_memory")
    assert chart._shown(dict.fromkeys(range(1, 4), 1.0), 6) == [1, 2, 3, 10, 11, 12]
    assert chart._shown(dict.fromkeys(range(1, 9), 1.0), 6) == [1, 2, 3, 4, 5, 10]


def test_a_candidate_that_is_measured_again_has_its_newest_figure() -> None:
    chart = RateChart()
    chart.note_rate(1, {"micro_batch_size": 1, "bta_tile": None}, 9_000.0)
    chart.note_rate(1, {"bta_tile": None, "micro_batch_size": 1}, 6_000.0)  # as PostgreSQL may order it
    text = io.StringIO()
    Console(width=80, file=text).print(*chart.draw(80, 12, final=True))
    assert "6,000" in text.getvalue()
    assert "9,000" not in text.getvalue()


@pytest.mark.parametrize(("height", "rows"), [(10, 3), (18, 3), (19, 4), (27, 12), (60, 12)])
def test_a_chart_has_as_many_rows_as_the_terminal_has_room_for(height: int, rows: int) -> None:
    trials = [
        event(size, EventCode.TRIAL, candidate={"micro_batch_size": size}, tokens_per_second=100.0 + size)
        for size in range(1, 31)
    ]
    file = io.StringIO()
    Console(width=80, height=height, file=file).print(view_of(started_ago(1), *trials))
    assert len(re.findall(r"^ *\d+ █", file.getvalue(), re.MULTILINE)) == rows


def test_memory_is_drawn_against_the_limit_from_a_tenth_of_it_on() -> None:
    total = RECOMMENDATION.memory.total
    for limit, cells in ((10 * total, 76), (10 * total - 10, 8)):
        small = RECOMMENDATION.model_copy(update={"memory_limit_bytes": limit})
        text = render(view_of(event(1, EventCode.RECOMMENDATION, recommendation=small.model_dump(mode="json"))))
        (bar,) = re.findall(r"^(█+)(?:░+)?$", text, re.MULTILINE)
        assert len(bar) == pytest.approx(cells, abs=2)


def started_ago(seconds: float) -> Event:
    return Event(seq=1, at=NOW - timedelta(seconds=seconds), code=EventCode.STARTED, message="started")


def confident(confidence: int) -> Event:
    best = RECOMMENDATION.model_copy(update={"confidence": confidence})
    return event(2, EventCode.RECOMMENDATION, recommendation=best.model_dump(mode="json"))


def test_remaining_time_follows_the_confidence_and_the_budget() -> None:
    assert re.search(r"0:0[01] passed, at most about 0:(09|10) left", render(view_of(started_ago(0))))
    assert re.search(r"0:06 passed, about 0:0[12] left", render(view_of(started_ago(6), confident(48))))  # 60 is asked
    assert "0:05 passed, at most about 0:05 left" in render(view_of(started_ago(5), confident(30))), "both end then"
    assert re.search(r"0:06 passed, at most about 0:0[34] left", render(view_of(started_ago(6), confident(10))))
    for done in (*((started_ago(6), confident(sure)) for sure in (60, 99)), (started_ago(10),), (started_ago(20),)):
        assert "comparing and checking" in render(view_of(*done))
    ended = render(view_of(event(1, EventCode.STARTED), confident(60), event(3, EventCode.SUCCEEDED)))
    assert "left" not in ended
    assert "0:02" in ended
    assert "best so far" not in ended  # the answer follows, and says it once
    assert "◀ recommended" in ended


def test_the_clock_of_a_resumed_exploration_goes_on_where_it_stopped() -> None:
    def at(seconds: float, code: EventCode) -> Event:
        return Event(seq=1, at=NOW - timedelta(seconds=seconds), code=code, message="")

    view = view_of(at(100, EventCode.STARTED), at(97, EventCode.CANCELLED), at(2, EventCode.RESUMED))
    assert re.search(r"0:0[56] passed", render(view))
    started_again = view_of(at(5, EventCode.STARTED), at(2, EventCode.RESUMED))  # its worker was killed
    assert re.search(r"0:0[56] passed", render(started_again))


def test_another_variant_starts_an_empty_chart() -> None:
    text = render(view_of(*EVENTS[:4], event(5, EventCode.VARIANT, num_query_groups=2)))
    assert "tokens/s" not in text
    assert "best so far" not in text


def test_a_narrow_terminal_and_messages_with_markup_do_no_harm() -> None:
    odd = event(1, EventCode.WARNING, "[red]not markup[/] " * 20)
    trial = event(2, EventCode.TRIAL, candidate=BASE.model_dump(mode="json"), tokens_per_second=None)
    assert "[red]not markup" in render(view_of(odd, trial, EVENTS[3], odd), width=30)
    assert re.search(r"^[█░]{10} *$", render(view_of(EVENTS[3]), width=13), re.MULTILINE)


@pytest.mark.parametrize("width", [80, 120])
def test_no_word_is_cut(width: int) -> None:
    view = view_of(*EVENTS[:4], event(5, EventCode.WARNING, "a long message " * 20))
    words = {word for line in render(view, width).splitlines() for word in line.split()}
    known = {word for line in render(view, 1000).splitlines() for word in line.split()}
    assert {word for word in words if word.isascii()} <= known | {"..."}


def test_lines_scroll_when_they_say_something_new() -> None:
    text = io.StringIO()
    console = Console(width=80, file=text, force_terminal=True)
    with Live(LiveView("job1", REQUEST), console=console, auto_refresh=False, transient=True) as live:
        output = LiveOutput(live, LiveView("job1", REQUEST))
        for one in (EVENTS[0], EVENTS[2], EVENTS[3], EVENTS[3], confident(99), EVENTS[4]):
            output.show(one)
    lines = re.findall(r"BEXP\d+", text.getvalue())
    assert lines == ["BEXP101", "BEXP202"]
    assert "\n        performance: 1.23x base" in text.getvalue()


@pytest.mark.parametrize(("is_terminal", "is_dumb"), [(True, False), (True, True), (False, False)])
def test_only_a_terminal_that_can_draw_gets_a_view(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, is_dumb: bool
) -> None:
    monkeypatch.setattr(Console, "is_terminal", is_terminal)
    monkeypatch.setattr(Console, "is_dumb_terminal", is_dumb)
    with following.open_output(Exploration.model_validate(job_document("queued")), to_stderr=False) as output:
        assert isinstance(output, LiveOutput) is (is_terminal and not is_dumb)


@pytest.mark.parametrize("worker_has_failed", [False, True])
def test_what_ends_the_events_ends_the_command_and_a_failed_worker_is_told_first(worker_has_failed: bool) -> None:
    def events(_: str) -> Iterator[Event]:
        yield EVENTS[0]
        raise ServiceError("it is gone")

    def check() -> None:
        if worker_has_failed:
            raise WorkerEndedError("the worker has failed", 1)

    job, before = Exploration.model_validate(job_document("queued")), threading.enumerate()
    with pytest.raises(ServiceError, match="the worker has failed" if worker_has_failed else "it is gone"):
        following.follow(SimpleNamespace(events=events), job, check=check)
    for thread in threading.enumerate():
        if thread not in before:
            thread.join()


def test_a_view_is_drawn_while_nothing_comes_and_by_no_other_thread(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread would draw what this one is changing."""
    monkeypatch.setattr(following, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setattr(Console, "is_dumb_terminal", False)
    job, _ = queue.enqueue(REQUEST)
    before = set(threading.enumerate())
    begun: set[str] = set()

    def check() -> None:
        begun.update(thread.name for thread in threading.enumerate() if thread not in before)
        queue.request_cancel(job.id)

    stored = StoredExplorations(queue.database)
    assert following.follow(stored, stored.get(job.id), check=check).code is EventCode.CANCELLED
    assert begun == {"events"}
