"""`bexp.Client` and `bexp.explore_config` against a real service, and the examples of docs/python.md."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bexp
from bexp import config_exploration
from bexp.client.errors import ProblemError
from bexp.client.explorations import Exploration
from bexp.client.view import ExplorationView
from bexp.config_exploration import ExplorationError
from bexp.explorer.records.event import Event, EventCode
from bexp.explorer.records.recommendation import Recommendation
from bexp.storage.jobs import JobState
from tests.api.cli.samples import EVENTS, RECOMMENDATION, REQUEST, SMALLER, TINY, UNDIVIDED, event, job_document

ROOT = Path(__file__).parents[3]


def test_an_exploration_is_submitted_followed_and_its_answer_applied(service: str, worker: Callable[..., Any]) -> None:
    with bexp.Client(service) as client, worker():
        submitted = client.submit(TINY, seed=3)
        assert submitted.request is not None
        assert (submitted.state, submitted.request.seed) == ("queued", 3)
        codes = [event.code for event in client.events(submitted.id)]
        assert (codes[0], codes[-1]) == (EventCode.QUEUED, EventCode.SUCCEEDED)
        assert client.wait(submitted.id).state == "succeeded"
        recommendation = client.recommendation(submitted.id)
        assert recommendation is not None
        assert (recommendation.micro_batch_size, recommendation.exploration_id) == (4, submitted.id)
        assert next(iter(client.list(state="succeeded"))).id == submitted.id
        assert client.trials(submitted.id) == ()
        assert "micro_batch_size" in client.export(submitted.id, "cerebras").text
        with pytest.raises(ProblemError) as refused:
            client.submit(TINY, batchsize=3)
        assert refused.value.lines()[1].startswith("batchsize: ")


def test_a_cancelled_exploration_has_no_answer_and_is_resumed(service: str) -> None:
    with bexp.Client(service) as client:
        exploration = client.cancel(client.submit(REQUEST.model_dump(mode="json")).id)
        assert exploration.is_final
        assert client.recommendation(exploration.id) is None
        assert client.resume(exploration.id).state == "queued"
        assert client.cancel(exploration.id).state == "cancelled"


def test_a_configuration_is_explored_on_the_service_of_the_environment(
    service: str, worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEXP_API_URL", service)
    seen: list[str] = []

    def note(view: ExplorationView) -> None:
        seen.append(str(view))

    with worker(answer=None, state=JobState.FAILED, code=EventCode.FAILED, message="broken"):
        result = bexp.explore_config(json.dumps(TINY), on_update=note)
    assert (result.exploration.state, result.recommendation) == ("failed", None)
    assert seen[-1].endswith("broken")
    with pytest.raises(ExplorationError, match="nothing is recommended"):
        result.save("best.json")


def test_a_notebook_has_one_output(service: str, worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, int]] = []

    class Handle:
        def update(self, view: ExplorationView) -> None:
            shown.append(("update", len(view._repr_html_())))

    def display(view: ExplorationView, *, display_id: bool) -> Handle:
        shown.append((f"display {display_id}", len(view._repr_html_())))
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    with worker():
        result = bexp.explore_config(TINY, url=service)
    assert [how for how, _ in shown] == ["display True", *["update"] * (len(shown) - 1)]
    assert shown[-1] == ("update", len(result._repr_html_()))
    assert "Recommended: micro_batch_size 4" in result._repr_html_()


def test_what_python_shows_names_the_size_that_a_trainer_takes_for_the_batch(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a list, sizes are independent of the batch; the one for the batch stands below, and trainers take it."""
    monkeypatch.setenv("BEXP_DATABASE_URL", sqlite_url)
    monkeypatch.delenv("BEXP_API_URL", raising=False)
    tables = ROOT / "benchmarks"
    shown: list[str] = []
    result = bexp.explore_config(
        tables / "tables/olmoe-zipf.yaml",
        device=f"replay:{tables}/results/tables/olmoe-zipf.jsonl",
        on_update=lambda view: shown.append(str(view)),
        progress=True,
        micro_batch_size=[1, 2, 4, 6, 8],
        batch_size=15,
    )
    assert result.recommendation is not None
    assert (result.exploration.micro_batch_size, result.recommendation.micro_batch_size) == (6, 1)
    lines = str(result.view).splitlines()
    assert "Recommended: micro_batch_size 6" in lines[0]
    assert any("batch_size 15: 1, in 15 accumulation steps" in line for line in lines)
    assert shown[-1] == str(result.view)
    answer = repr(result).splitlines()
    assert answer[0].startswith("Recommended micro_batch_size: 6 for ")
    assert "batch_size 15" in answer[1]
    assert len(answer) <= 12
    assert str(result) == repr(result)
    told = capsys.readouterr().err.splitlines()
    assert told
    assert all(line.startswith("BEXP") for line in told)
    fields = bexp.training_arguments(result.recommendation)
    assert fields["per_device_train_batch_size"] * fields["gradient_accumulation_steps"] == 15


def test_a_service_that_is_not_installed_beside_the_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BEXP_API_URL", raising=False)
    monkeypatch.setattr(config_exploration, "SESSION", "no_such_module")
    with pytest.raises(ExplorationError, match=r"the service is not installed .*No module named no_such_module"):
        bexp.explore_config(TINY)


def test_the_examples_of_the_documentation_run(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BEXP_DATABASE_URL", sqlite_url)
    monkeypatch.delenv("BEXP_API_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert names["result"].exploration.state == "succeeded"
    size, confidence = map(int, capsys.readouterr().out.splitlines()[0].split())
    assert (size, confidence > 90) == (4, True)
    assert bexp.RecommendedSetup.read("best.json").micro_batch_size == size


def test_a_wrong_configuration_for_this_machine_is_named(monkeypatch: pytest.MonkeyPatch, sqlite_url: str) -> None:
    monkeypatch.setenv("BEXP_DATABASE_URL", sqlite_url)
    with pytest.raises(ExplorationError, match="batchsize: is not a known field"):
        bexp.explore_config(TINY, device="cpu", batchsize=3)


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
