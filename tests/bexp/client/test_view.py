"""An exploration in a notebook."""

from __future__ import annotations

from bexp.client.view import ExplorationView
from bexp.explorer.records.event import Event, EventCode
from tests.api.cli.samples import EVENTS, event


def view_of(*events: Event) -> ExplorationView:
    view = ExplorationView("job1", "<tiny>")
    for one in events:
        view.show(one)
    return view


def test_the_table_has_every_size_and_marks_the_recommended_one() -> None:
    failed = event(5, EventCode.INFEASIBLE, candidate={"micro_batch_size": 8}, outcome="out_of_memory")
    view = view_of(*EVENTS[:4], failed)
    assert view.rates == {1: 10_000.0, 4: 12_345.6}
    html = view._repr_html_()
    assert "Best so far: micro_batch_size 4, 11,500 tokens/s per device, 1.23x base, confidence 87" in html
    assert html.count("<tr>") == 4
    assert "out of memory" in html
    assert "Memory at the peak: 4.75 of 8.00 GiB" in html
    assert "&lt;tiny&gt;" in html
    assert "<tiny>" not in html
    ended = view_of(*EVENTS)
    assert "Recommended: micro_batch_size 4" in str(ended)
    assert "12,346 tokens/s" in str(ended)


def test_a_message_is_text_and_another_variant_starts_an_empty_table() -> None:
    view = view_of(*EVENTS[:4], event(5, EventCode.VARIANT, "<script>", num_query_groups=2))
    assert view.rates == {}
    assert "&lt;script&gt;" in view._repr_html_()
