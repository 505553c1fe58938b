"""An exploration in a notebook."""

from __future__ import annotations

from bexp.client.view import ExplorationView
from bexp.explorer.records.event import Event, EventCode
from tests.api.cli.samples import EVENTS, RECOMMENDATION, SMALLER, UNDIVIDED, event


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


def test_the_answer_adds_what_trainers_and_exports_take_for_the_batch() -> None:
    line = (
        "For the batch: micro_batch_size 1 in 25 micro-steps, 10,900 tokens/s per device, confidence 71 out of 100; "
        "trainers and exports take this one"
    )
    view = view_of(*EVENTS)
    view.conclude(UNDIVIDED.model_dump(mode="json"))
    assert str(view).splitlines()[1] == line
    html = view._repr_html_()
    assert (line in html, html.count(">for the batch<"), html.count(">recommended<")) == (True, 1, 1)
    view.conclude(RECOMMENDATION.model_dump(mode="json"))
    assert "For the batch" not in str(view), "the recommended one divides it"
    view.conclude(UNDIVIDED.model_copy(update={"candidate": SMALLER.candidate}).model_dump(mode="json"))
    assert "micro_batch_size 4" in str(view), "the answer is for another variant than was shown last"
