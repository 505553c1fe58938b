"""An exploration in a notebook."""

from __future__ import annotations

from bexp.client.explorations import Exploration
from bexp.client.view import ExplorationView
from bexp.explorer.records.event import Event, EventCode
from bexp.explorer.records.recommendation import Recommendation
from tests.api.cli.samples import EVENTS, RECOMMENDATION, SMALLER, UNDIVIDED, event, job_document


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
    assert "Memory at the peak, as composed: 4.8 GiB of 8.0 GiB" in html
    assert "&lt;tiny&gt;" in html
    assert "<tiny>" not in html
    ended = view_of(*EVENTS)
    assert "Recommended: micro_batch_size 4" in str(ended)
    assert "12,346 tokens/s" in str(ended)


def test_a_message_is_text_and_another_variant_starts_an_empty_table() -> None:
    view = view_of(*EVENTS[:4], event(5, EventCode.VARIANT, "<script>", num_query_groups=2))
    assert view.rates == {}
    assert "&lt;script&gt;" in view._repr_html_()


def concluded(view: ExplorationView, best: Recommendation) -> str:
    view.conclude(Exploration.model_validate(job_document(recommendation=best, answer=None)))
    return str(view)


def test_the_rows_of_the_answer_stand_in_the_view() -> None:
    view = view_of(*EVENTS)
    shown = concluded(view, UNDIVIDED)
    (line,) = (each for each in shown.splitlines() if each.startswith("  batch "))
    assert line.endswith("batch_size 24: 1, in 25 accumulation steps, 5.2% slower than 4, confidence 71")
    html = view._repr_html_()
    assert "1, in 25 accumulation steps" in html
    assert (html.count(">for the batch<"), html.count(">recommended<")) == (1, 1)
    assert "4 divides it" in concluded(view, RECOMMENDATION)
    other = UNDIVIDED.model_copy(update={"candidate": SMALLER.candidate})
    assert "micro_batch_size 4" in concluded(view, other), "the answer is for another variant than was shown last"
