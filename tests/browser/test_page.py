"""The page in a real browser, against a running service under a path prefix that asks for tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from bexp.api.cli import app
from bexp.explorer.answers.answer import Explored, answer_text
from bexp.explorer.answers.lines import BRIEF
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.parallelism import Schedule
from bexp.explorer.meshes.mesh import Mesh, MeshPlan, PipelinePicture
from bexp.explorer.model.amounts import bytes_text
from bexp.explorer.records.event import Event, render_message
from bexp.storage.tokens import create_token, revoke_token
from tests.browser.chromium import Chromium
from tests.browser.conftest import TOKEN_CHECK_SECONDS, Service
from tests.browser.views import ENTER, TAB, button, count, log_in, open_exploration
from tests.workers.replay.samples import MODEL, request

pytestmark = pytest.mark.slow(together="browser")

MAX_BYTES = 600_000
MAX_LIST_SECONDS = 0.5
"""Of the processor, for the login and the list."""


def test_a_finished_exploration_is_shown_whole(browser: Chromium, service: Service) -> None:
    log_in(browser, service)
    browser.wait_for("document.querySelector('.list tbody a')")
    assert browser.processor_seconds() < MAX_LIST_SECONDS
    assert MODEL["name"] in browser.evaluate("document.querySelector('.list').innerText")
    browser.evaluate(f"document.querySelector('.list a[href$=\"{service.finished}\"]').click()")
    browser.wait_for("document.querySelectorAll('svg.plot').length === 5 && document.querySelector('.heatmap')")

    best = service.client.get(service.finished)
    assert best.recommendation is not None
    shown = browser.evaluate("[...document.querySelectorAll('.headline strong')].map((node) => node.textContent)")
    assert shown[0] == str(best.recommendation.candidate.micro_batch_size)
    assert shown[1] == f"{best.recommendation.expected_tokens_per_second:,.0f}\xa0tokens/s"
    assert shown[3] == str(best.recommendation.confidence)
    trials, events = service.client.trials(service.finished), service.client.stored_events(service.finished)
    browser.wait_for(f"document.querySelectorAll('.log li').length === {len(events)}")
    assert count(browser, ".data tbody tr") == len(trials)
    assert browser.evaluate("document.querySelector('h1').textContent") == MODEL["name"]

    rows = best.text.rows if best.text is not None else ()
    in_short = [row.text for row in rows if row.importance in BRIEF]
    assert browser.evaluate(
        "[...document.querySelectorAll('.said ~ .rows > div > dd')].map((one) => one.textContent)"
    ) == [text.replace("`", "") for text in in_short]
    assert not browser.evaluate("document.querySelector('.rows + details').open")
    assert best.answer is not None
    shares = browser.evaluate("[...document.querySelectorAll('.bars dd')].map((one) => one.textContent)")
    assert shares == [f"{share:.0%}" for share in best.answer.variants[0].importance.values()]
    spent = sum(trial.measurement.phases.total for trial in trials)
    text = browser.evaluate("document.querySelector('[aria-label*=\"trials over time\"]').ariaLabel")
    assert text.startswith(f"{len(trials)} trials over time, {spent:.2f}\xa0s: ")
    check_parallel(browser, [trial.candidate for trial in trials if trial.tokens_per_second is not None])
    check_filters(browser, events)
    check_notes(browser, service)

    browser.evaluate(
        "(HTMLAnchorElement.prototype.click = function () { window.saved = [this.download, this.href]; }, "
        "document.querySelector('.export select').value = 'deepspeed', "
        "document.querySelector('.export button').click())"
    )
    browser.wait_for("window.saved")
    assert browser.evaluate("window.saved[0]") == "bexp-deepspeed.json"
    assert browser.evaluate("window.saved[1].startsWith('blob:')")
    said = "document.querySelector('.export [role=status]').textContent"
    assert browser.evaluate(said) == ""
    browser.evaluate(
        "(document.querySelector('.export select').value = 'transformers', "
        "document.querySelector('.export button').click())"
    )
    notes = service.client.export(service.finished, "transformers").notes
    browser.wait_for(f"{said}.startsWith('Not in bexp-transformers.json')")
    assert notes and all(note in browser.evaluate(said) for note in notes)

    refused = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
    assert [problem for problem in browser.problems if problem != refused] == []
    assert {urlsplit(url)._replace(path="", query="").geturl() for url in browser.requests if url[:5] != "data:"} == {
        service.url.removesuffix("/team/bexp")
    }
    assert 0 < browser.received_bytes < MAX_BYTES


def check_parallel(browser: Chromium, candidates: list[Candidate]) -> None:
    """Check that a choice of a size leaves the lines of its candidates, and no others."""
    browser.evaluate(
        "document.querySelector('.strand') === null && document.querySelector('details:has(.filters) summary').click()"
    )
    browser.wait_for(f"document.querySelectorAll('.strand').length === {len(set(candidates))}")
    browser.evaluate("document.querySelector('[data-axis=micro_batch_size]').focus()")
    browser.press("ArrowDown", 40)
    size = int(browser.wait_for("document.activeElement.value"))
    of_size = len({one for one in candidates if one.micro_batch_size == size})
    assert 0 < of_size < len(set(candidates))
    assert count(browser, ".strand") == of_size


def check_filters(browser: Chromium, events: Sequence[Event]) -> None:
    """Check that the filter of the log shows the lines of a level with a word, and says how many, also if none."""
    shown = "[...document.querySelectorAll('.log li:not([hidden]) :last-child')].map((line) => line.textContent)"
    none = "document.querySelector('.log > p').checkVisibility()"
    browser.evaluate(
        "([window.word, window.level] = document.querySelectorAll('.filters:has([type=search]) :is(input, select)'), "
        "level.value = '2', level.dispatchEvent(new Event('change')), word.focus())"
    )
    browser.type("FLASH")
    found = [render_message(one) for one in events if one.code // 100 == 2 and "flash" in one.message]
    assert 0 < len(found) < len(events)
    assert browser.evaluate(shown) == found
    assert browser.evaluate("document.querySelector('.filters:has([type=search]) [role=status]').textContent") == (
        f"{len(found)} of {len(events)} lines"
    )
    assert not browser.evaluate(none)
    browser.type("no such word")
    assert browser.evaluate(shown) == [] and browser.evaluate(none)


def check_notes(browser: Chromium, service: Service) -> None:
    """Check that notes are saved as they are written, and not read as markup."""
    browser.evaluate(
        "(document.querySelector('.notes').open = true, document.querySelector('.notes textarea').focus())"
    )
    browser.type("<i>twice</i>\nslow")
    browser.evaluate("document.querySelector('.notes button').click()")
    browser.wait_for("document.querySelector('.notes [role=status]').textContent === 'Saved'")
    assert service.client.get(service.finished).notes == "<i>twice</i>\nslow"
    assert browser.evaluate("document.querySelector('.notes button').disabled")


def test_a_mesh_is_shown_with_its_pipeline(browser: Chromium, service: Service) -> None:
    open_exploration(browser, service, service.finished)
    best = service.client.get(service.finished)
    assert best.recommendation is not None
    plan = MeshPlan(
        mesh=Mesh(tensor=2, pipeline=2, schedule=Schedule.ONE_F_ONE_B, data=8),
        base_mesh=Mesh(data=32),
        num_micro_batches=4,
        tokens_per_second=64_000,
        compute_share=0.75,
        exchange_share=0.05,
        bubble_share=0.2,
        layers_per_stage=(3, 1),
        fullest_rank=1,
        picture=PipelinePicture(seconds=0.25, ranks=(0, 1), lines=("FFff..BB", "..FFBBff")),
    )
    meshed = best.recommendation.model_copy(update={"plan": plan})
    text = answer_text(Explored("job", None), meshed, None)
    assert text is not None
    answer = {"recommendation": meshed.model_dump(mode="json"), "text": text.model_dump(mode="json")}
    shown = browser.evaluate(
        "import(new URL('web/answer.js', document.baseURI)).then(({ renderAnswer }) => "
        f"renderAnswer({json.dumps({**answer, 'answer': None})}).map((node) => node.textContent).join(' '))"
    )
    measurement = {"candidate": best.recommendation.candidate.model_dump(mode="json"), "outcome": "ok"}
    trials = [{"number": number, "kind": "components", "measurement": measurement, "seconds": 1} for number in (0, 1)]
    events = [{"data": {"trial": 1, "mesh": plan.mesh.model_dump(mode="json")}}, {"data": {}}]
    table = browser.evaluate(
        "import(new URL('web/trials_table.js', document.baseURI)).then(({ TrialsTable, withMeshes }) => "
        "{ const table = new TrialsTable(); "
        f"table.update(withMeshes({json.dumps(trials)}, {json.dumps(events)})); return table.root.textContent; }})"
    )
    assert "peakmeshtile" in table
    assert "tensor=2 pipeline=2 (1f1b) data=8" in table
    exploration = service.client.get(service.finished).model_dump(mode="json")
    stored = [trial.model_dump(mode="json") for trial in service.client.trials(service.finished)]
    told = [event.model_dump(mode="json") for event in service.client.stored_events(service.finished)]
    told[-1]["data"] = {"trial": 1, "mesh": plan.mesh.model_dump(mode="json")}
    late = browser.evaluate(  # the page reads all stored trials before it follows the events
        "import(new URL('web/exploration.js', document.baseURI)).then(async ({ ExplorationView }) => "
        "{ const view = new ExplorationView(document.body.appendChild(document.createElement('main'))); "
        f"for (const events of [[], {json.dumps(told)}]) {{ "
        f"view.update({json.dumps(exploration)}, {json.dumps(stored)}, events); "
        "await new Promise((done) => setTimeout(done, 700)); } "
        "view.close(); return view.trials.root.textContent; })"
    )
    assert "tensor=2 pipeline=2 (1f1b) data=8" in late
    for part in (
        "meshtensor=2 pipeline=2 (1f1b) data=8 sharding=none",
        "75.0% computation, 5.0% exchange, 20.0% bubble",
        "3 1 per stage; rank 1 is the fullest",
        "   0  FFff..BB\n   1  ..FFBBff",
    ):
        assert part in shown


def test_a_cancelled_exploration_is_resumed_and_followed(browser: Chromium, service: Service) -> None:
    service.hold()
    service.queue.enqueue(request(seed=6))  # the only worker is busy with it
    job_id = service.queue.enqueue(request(seed=7))[0].id
    log_in(browser, service, at=f"#/explorations/{job_id}")
    try:
        browser.wait_for("document.querySelector('.badge.queued') && document.querySelector('.log li')")
        browser.evaluate(f"(window.confirm = () => true, {button('Cancel')}.click())")
        browser.wait_for(f"document.querySelector('.badge.cancelled') && {button('Resume')}")
        browser.evaluate(f"{button('Resume')}.click()")
        browser.wait_for("document.querySelector('.badge.queued')")
    finally:
        service.profiler.gate.set()
    browser.wait_for("document.querySelector('.badge.succeeded') && document.querySelector('.headline strong')")
    assert browser.evaluate(f"{button('Resume')} === undefined")
    browser.wait_for(f"document.querySelectorAll('.log li').length === {len(service.client.stored_events(job_id))}")


def check_that_nothing_is_asked(browser: Chromium) -> None:
    """Check that the page does not ask the service again with no token."""
    asked = len(browser.requests)
    time.sleep(0.7)
    browser.evaluate("1")
    assert len(browser.requests) == asked


def test_a_revoked_token_is_asked_for_again_once(browser: Chromium, service: Service) -> None:
    token = create_token(service.database, "short-lived")
    log_in(browser, service, token)
    browser.wait_for("document.querySelector('.list tbody a')")
    revoke_token(service.database, "short-lived")
    time.sleep(2 * TOKEN_CHECK_SECONDS)  # the API may have looked it up just before
    browser.evaluate("document.querySelector('.list a').click()")
    browser.wait_for("document.getElementById('login').open")
    assert "revoked" in browser.evaluate("document.getElementById('login-reason').textContent")
    assert browser.evaluate("sessionStorage.length + localStorage.length") == 0
    check_that_nothing_is_asked(browser)
    browser.type("bexp_wrong")
    browser.press(*ENTER)
    browser.wait_for("document.getElementById('login-reason').textContent.includes('does not accept')")
    browser.evaluate("document.getElementById('token').select()")
    browser.type(service.token)
    browser.press(*ENTER)
    browser.wait_for("document.querySelector('.headline')")


def test_a_token_that_is_revoked_while_an_exploration_is_followed_is_asked_for_once(
    browser: Chromium, service: Service
) -> None:
    token = create_token(service.database, "leaving")
    service.hold()
    job_id = service.queue.enqueue(request(seed=5))[0].id
    log_in(browser, service, token, at=f"#/explorations/{job_id}")
    try:
        browser.wait_for("document.querySelector('.badge.running') && document.querySelector('.log li')")
        revoke_token(service.database, "leaving")
        browser.wait_for("document.getElementById('login').open")
        assert "revoked" in browser.evaluate("document.getElementById('login-reason').textContent")
        check_that_nothing_is_asked(browser)
    finally:
        service.profiler.gate.set()


def test_a_trial_has_the_figures_of_its_log_line_and_says_whether_they_are_measured(
    browser: Chromium, service: Service
) -> None:
    open_exploration(browser, service, service.finished)
    stored = [trial for trial in service.client.trials(service.finished) if trial.tokens_per_second is not None]
    found = [next(trial for trial in stored if trial.is_predicted is asked) for asked in (True, False)]
    both = sorted(found, key=lambda trial: trial.number)
    documents = json.dumps([trial.model_dump(mode="json") for trial in both])
    rows, titles, starred = browser.evaluate(
        "Promise.all(['trials_table', 'charts'].map((name) => import(new URL(`web/${name}.js`, document.baseURI))))"
        f".then(([{{ TrialsTable }}, {{ throughputChart, heatMap }}]) => {{ const trials = {documents}; "
        "const table = new TrialsTable(); table.update(trials); "
        "const chart = throughputChart({ trials, best: null, width: 600 }); "
        "return [[...table.body.rows].map((row) => [...row.cells].map((cell) => cell.textContent)), "
        "[...chart[0].querySelectorAll('title')].map((title) => title.textContent), "
        "heatMap({ trials, best: null }).querySelectorAll('td:has([aria-hidden])').length]; })"
    )
    assert starred == 1, "a cell says of a figure what the log says"
    for trial, row, title in zip(both, rows, titles, strict=True):
        figures = trial.describe_figures()
        assert title.replace("\xa0", " ").endswith(figures)
        shown = [cell.replace("\xa0", " ") for cell in row]
        assert bytes_text(trial.peak_bytes or 0) in shown
        assert ("predicted in part" if trial.is_predicted else "measured") in shown
        assert trial.is_predicted == figures.endswith("predicted in part")


def test_columns_of_trials_sort_by_keyboard(browser: Chromium, service: Service) -> None:
    open_exploration(browser, service, service.finished)
    browser.wait_for("document.querySelector('[data-column=\"rate\"]')")
    browser.evaluate("document.querySelector('[data-column=\"rate\"]').focus()")
    browser.press(*ENTER)
    cells = "[...document.querySelectorAll('.data tbody tr')].map((row) => row.cells[CELL].textContent)"
    at = browser.evaluate("document.activeElement.closest('th').cellIndex")
    assert browser.evaluate("document.activeElement.closest('th').ariaSort") == "descending"
    speeds = [
        float(text.split("\xa0")[0].replace(",", ""))
        for text in browser.evaluate(cells.replace("CELL", str(at)))
        if text[0].isdigit()
    ]
    assert len(speeds) > 2
    assert speeds == sorted(speeds, reverse=True)
    browser.press(*ENTER)
    assert browser.evaluate("document.activeElement.closest('th').ariaSort") == "ascending"


def test_keyboard_and_screen_reader_find_everything(browser: Chromium, service: Service) -> None:
    open_exploration(browser, service, service.finished)
    browser.wait_for("document.querySelectorAll('svg.plot').length === 5")
    named = browser.accessible_names()
    roles = {role for role, _ in named}
    assert {"main", "banner", "navigation", "log", "status", "figure", "table", "columnheader"} <= roles
    needing = {"button", "link", "image", "region", "navigation", "log", "combobox"}
    assert [role for role, name in named if role in needing and not name.strip()] == []
    regions = [name for role, name in named if role == "region"]
    assert sorted(set(regions)) == sorted(regions), "each has a name of its own"
    assert browser.evaluate("[...document.querySelectorAll('li')].every((one) => !one.parentElement.role)")
    images = [name for role, name in named if role == "image"]
    assert any(name.startswith("Throughput over the micro-batch size.") for name in images)

    browser.open(f"{service.url}/docs")  # unlike the other page, it moves the focus nowhere
    browser.wait_for("document.querySelector('h2')")
    browser.press(*TAB)
    assert browser.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert browser.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_nothing_moves_while_an_exploration_appears(browser: Chromium, service: Service) -> None:
    log_in(browser, service)
    browser.wait_for("document.querySelector('.list tbody a')")
    time.sleep(0.6)  # what moves within half a second of a key is not counted
    browser.evaluate(
        "(window.moved = 0, new PerformanceObserver((list) => list.getEntries().forEach((one) => window.moved += "
        f"one.value)).observe({{ type: 'layout-shift' }}), location.hash = '#/explorations/{service.finished}')"
    )
    browser.wait_for("document.querySelectorAll('svg.plot').length === 5 && document.querySelector('.log li')")
    assert browser.evaluate("new Promise((done) => setTimeout(() => done(window.moved), 200))") < 0.1


def test_the_page_of_the_rest_api_needs_no_other_host(browser: Chromium, service: Service) -> None:
    browser.open(f"{service.url}/docs#schema-Recommendation")
    browser.wait_for("document.getElementById('schema-Recommendation').open")
    assert "GET/v1/explorations" in browser.evaluate("document.querySelector('main').textContent")
    assert browser.problems == []
    assert {urlsplit(url).hostname for url in browser.requests if not url.startswith("data:")} == {"127.0.0.1"}


def test_a_report_is_one_file_that_loads_nothing(
    browser: Chromium, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEXP_API_URL", service.url)
    monkeypatch.setenv("BEXP_API_TOKEN", service.token)
    file = tmp_path / "report.html"
    service.queue.write_notes(service.finished, "of the page")
    ran = CliRunner().invoke(app, ["report", service.finished, "--out", str(file)])
    assert ran.exit_code == 0, ran.output
    assert service.token not in file.read_text()
    browser.open(file.as_uri())
    browser.wait_for("document.querySelector('.notes p.written')?.textContent === 'of the page'")
    assert count(browser, ".notes :is(textarea, button, i)") == 0
    browser.wait_for("document.querySelectorAll('svg.plot').length === 5 && document.querySelector('.heatmap')")
    assert browser.evaluate("document.querySelector('h1').textContent") == MODEL["name"]
    assert count(browser, ".data tbody tr") == len(service.client.trials(service.finished))
    assert browser.problems == []
    assert {url for url in browser.requests if not url.startswith("data:")} == {file.as_uri()}


def test_a_reused_answer_is_found_by_its_label_and_deleted(browser: Chromium, service: Service) -> None:
    document = request(labels={"team": "<b>search</b>"}).model_dump(mode="json")
    job = service.client.submit(document)
    assert job.answered_from is not None
    log_in(browser, service)
    browser.wait_for("document.querySelector('.list button.label')")
    browser.evaluate("document.querySelector('.list button.label').click()")
    browser.wait_for("document.querySelectorAll('.list tbody tr').length === 1")
    assert browser.evaluate("document.getElementById('wanted').value") == "team=<b>search</b>"
    browser.evaluate("document.querySelector('.list tbody a').click()")
    browser.wait_for("document.querySelector('.source a') && document.querySelector('.headline strong')")
    assert browser.evaluate("document.querySelector('.source a').hash") == f"#/explorations/{service.finished}"
    assert browser.evaluate("document.querySelector('.labels').textContent") == "team=<b>search</b>"
    browser.evaluate(f"(window.confirm = () => true, {button('Delete')}.click())")
    browser.wait_for("location.hash === '#/' && document.querySelector('.list tbody a')")
    assert count(browser, f'.list a[href$="{job.id}"]') == 0
