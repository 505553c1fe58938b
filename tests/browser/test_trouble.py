"""The page while the service is slow, refuses, or does not answer; and figures that no real exploration here shows."""

from __future__ import annotations

import json
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from bexp.explorer.cost.step import required_bytes
from bexp.explorer.records.event import render_line
from tests.browser.chromium import ZONE, Chromium
from tests.browser.conftest import Service
from tests.browser.views import ENTER, button, count, log_in, open_exploration
from tests.workers.replay.samples import request

pytestmark = pytest.mark.slow(together="browser")

FAST = "(window.slow ??= setTimeout, window.setTimeout = (task, delay) => slow(task, delay / 20), 1)"
"""Lets what the page repeats come sooner."""
NOTICE = "document.getElementById('notice').textContent"


def intercept(browser: Chromium, body: str) -> None:
    """Let `body` answer the page's requests to `url`; `real()` asks the service, and `wait` takes milliseconds."""
    browser.evaluate(
        "(window.realFetch ??= fetch, window.wait = (delay) => new Promise((done) => setTimeout(done, delay)), "
        "window.refuse = (status, detail) => new Response(JSON.stringify({ detail }), { status }), window.fetch = "
        f"async (url, options) => {{ const real = () => realFetch(url, options); {body} return real(); }}, 1)"
    )


def choose(browser: Chromium, control: str, value: str) -> None:
    browser.evaluate(f"({control}.value = {json.dumps(value)}, {control}.dispatchEvent(new Event('change')))")


def hold(service: Service, **changes: Any) -> str:
    """Return an exploration whose trials wait for the gate of the profiler."""
    service.hold()
    return service.queue.enqueue(request(**changes))[0].id


def test_a_list_goes_on_after_a_search_that_is_refused(browser: Chromium, service: Service) -> None:
    log_in(browser, service)
    browser.evaluate(FAST)
    browser.wait_for("document.querySelector('.list tbody a')")
    choose(browser, "wanted", "one two three four five six seven eight nine")
    browser.wait_for(f"{NOTICE}.startsWith('search:')")
    asked = "performance.getEntriesByType('resource').filter(({ name }) => name.includes('nine')).length"
    browser.wait_for(f"{asked} > 3")
    choose(browser, "wanted", "")
    browser.wait_for(f"{NOTICE} === ''")
    label = "a label of more words than a search can have"
    job_id = service.queue.enqueue(request(seed=61, labels={"about": label}))[0].id
    browser.wait_for(f"document.querySelector('.list [data-id=\"{job_id}\"] button.label')")
    browser.evaluate(f"document.querySelector('.list [data-id=\"{job_id}\"] button.label').click()")
    browser.wait_for(f"document.querySelectorAll('.list tbody tr').length === 1 && {NOTICE} === ''")
    intercept(
        browser,
        "window.held = options.signal; await new Promise((_, fail) => "
        "held.addEventListener('abort', () => fail(held.reason)));",
    )
    browser.wait_for("window.held !== undefined")
    intercept(browser, "")
    browser.evaluate("location.hash = '#/submit'")
    browser.wait_for("document.querySelectorAll('#trainer option').length > 5")
    assert browser.evaluate(NOTICE) == "", "a request that the page ended says nothing of the service"


def test_a_list_shows_what_was_asked_for_last_and_moves_nobody(browser: Chromium, service: Service) -> None:
    log_in(browser, service)
    browser.wait_for("document.querySelector('.list tbody a')")
    browser.evaluate(
        "(document.body.style.paddingBottom = '3000px', window.row = document.querySelector('.list tbody tr'), "
        "row.querySelector('input').focus(), scrollTo(0, 1500))"
    )
    choose(browser, "state", "")
    browser.wait_for("!window.row.isConnected")
    assert browser.evaluate("[scrollY, document.activeElement.type]") == [1500, "checkbox"]
    intercept(browser, "if (url.includes('succeeded')) { const late = await real(); await wait(600); return late; }")
    choose(browser, "state", "succeeded")
    choose(browser, "state", "running")
    browser.wait_for("document.querySelectorAll('.list tbody tr').length === 0")
    browser.evaluate("wait(900)")
    assert count(browser, ".list tbody tr") == 0, "the answer that came last is of another question"

    intercept(browser, "await wait(800);")
    browser.evaluate(
        "(document.addEventListener('focusin', ({ target }) => window.last = target), location.hash = '#/')"
    )
    browser.wait_for("!document.querySelector('.list tbody a') && document.getElementById('wanted')")
    browser.evaluate("document.getElementById('wanted').focus()")
    browser.type("H200")
    browser.wait_for("document.querySelector('.list tbody a')")
    assert browser.evaluate("window.last.id") == "wanted"


def test_each_view_appears_once_the_service_is_back(browser: Chromium, service: Service) -> None:
    log_in(browser, service)
    browser.wait_for("document.querySelector('.list tbody a')")
    browser.evaluate(FAST)
    intercept(
        browser,
        "if (window.away) return refuse(503, 'It is away.');"
        "if (window.full && url.includes('/events')) return refuse(429, 'There are too many streams.');",
    )
    another = service.queue.enqueue(request(seed=64))[0].id
    for view, shown in (
        (f"explorations/{service.finished}", ".headline"),
        ("", ".list tbody a"),
        (f"compare/{service.finished},{another}", ".compared"),
    ):
        browser.evaluate(f"(window.away = true, location.hash = '#/{view}')")
        browser.wait_for(f"{NOTICE} === 'It is away.'")
        browser.evaluate("window.away = false")
        browser.wait_for(f"document.querySelector('{shown}') && {NOTICE} === ''")
    browser.evaluate(f"(window.full = true, location.hash = '#/explorations/{service.finished}')")
    browser.wait_for(f"{NOTICE} === 'There are too many streams. The page tries again.'")
    browser.evaluate("window.full = false")
    browser.wait_for(f"document.querySelector('.log li') && {NOTICE} === ''")


def test_what_was_typed_is_there_after_the_login(browser: Chromium, service: Service) -> None:
    browser.open(f"{service.url}/#/submit")
    browser.wait_for("document.querySelectorAll('#trainer option').length > 5")
    for name, text in (("document", '{"model": {}}'), ("batch-size", "64")):
        browser.evaluate(f"document.getElementById('{name}').focus()")
        browser.type(text)
    browser.evaluate("(trainer.value = 'trl', document.querySelector('form.card').requestSubmit())")
    browser.wait_for("document.activeElement.id === 'token'")
    browser.type(service.token)
    browser.press(*ENTER)
    browser.wait_for("!document.getElementById('login').open")
    browser.wait_for("document.querySelectorAll('#trainer option').length > 5")
    given = "['document', 'batch-size', 'seq-length', 'trainer'].map((name) => document.getElementById(name).value)"
    assert browser.evaluate(given) == ['{"model": {}}', "64", "", "trl"]
    assert "--batch-size 64 --trainer trl" in browser.evaluate("document.querySelector('.command code').innerText")


def test_an_end_is_shown_although_the_service_was_away(browser: Chromium, service: Service) -> None:
    job_id = hold(service, seed=62)
    try:
        log_in(browser, service, at=f"#/explorations/{job_id}")
        browser.wait_for("document.querySelector('.badge.running') && document.querySelector('.log li')")
        browser.evaluate(FAST)
        intercept(
            browser,
            "if (url.endsWith('/cancel')) return refuse(403, 'This token may not cancel.');"
            "if (window.away && !url.includes('/events')) return refuse(503, 'It is away.');",
        )
        browser.evaluate(f"(window.confirm = () => true, {button('Cancel')}.click())")
        browser.wait_for(f"{NOTICE} === 'This token may not cancel.'")
    finally:
        service.profiler.gate.set()
    browser.wait_for("document.querySelector('.badge.succeeded')")
    assert browser.evaluate(NOTICE) == "This token may not cancel.", "news of the exploration do not hide it"

    job_id = hold(service, seed=63)
    try:
        browser.evaluate(f"location.hash = '#/explorations/{job_id}'")
        browser.wait_for("document.querySelector('.badge.running') && document.querySelector('.log li')")
        browser.evaluate("window.away = true")
    finally:
        service.profiler.gate.set()
    browser.wait_for(f"document.querySelector('.log .end') && {NOTICE} === 'It is away.'")
    browser.evaluate("new Promise((done) => slow(done, 600)).then(() => { window.away = false; })")
    browser.wait_for(f"document.querySelector('.badge.succeeded') && {NOTICE} === ''")

    # A connection breaks between the last event and the end of its stream.
    intercept(
        browser,
        "if (!url.includes('/events') || window.broken) return real(); window.broken = true;"
        "const parts = [await (await real()).text()]; return new Response(new ReadableStream({ async pull(to) {"
        "if (parts.length) return to.enqueue(new TextEncoder().encode(parts.pop())); await wait(1000);"
        "to.error(new TypeError('network error')); } }));",
    )
    browser.evaluate(  # it says so for a moment
        f"(new MutationObserver(() => window.wasLost ||= {NOTICE}.includes('lost'))"
        ".observe(document.getElementById('notice'), { childList: true, characterData: true, subtree: true }), 1)"
    )
    browser.evaluate(f"location.hash = '#/explorations/{service.finished}'")
    browser.wait_for("window.broken && window.wasLost && document.querySelector('.log .end')")
    browser.wait_for(f"{NOTICE} === ''")


def test_a_hidden_tab_holds_no_stream_and_misses_nothing(browser: Chromium, service: Service) -> None:
    job_id = hold(service, seed=65)
    turn = "(window.isHidden = HIDDEN, document.dispatchEvent(new Event('visibilitychange')), 1)"
    try:
        log_in(browser, service)
        browser.evaluate("Object.defineProperty(document, 'hidden', { get: () => window.isHidden ?? false }), 1")
        intercept(browser, "if (url.includes('/events')) (window.streams ??= []).push(options.signal);")
        browser.evaluate(f"location.hash = '#/explorations/{job_id}'")
        browser.wait_for("document.querySelector('.badge.running') && document.querySelector('.log li')")
        browser.evaluate(turn.replace("HIDDEN", "true"))
        browser.wait_for("streams.length === 1 && streams[0].aborted")
    finally:
        service.profiler.gate.set()
    assert list(service.client.events(job_id))
    browser.evaluate("wait(1000)")
    assert browser.evaluate(f"[streams.length, {NOTICE}]") == [1, ""]
    browser.evaluate(turn.replace("HIDDEN", "false"))
    browser.wait_for("document.querySelector('.badge.succeeded') && document.querySelector('.log .end')")
    assert count(browser, ".log li") == len(service.client.stored_events(job_id))


def test_a_log_has_the_words_of_the_lines_and_is_made_fast(browser: Chromium, service: Service) -> None:
    open_exploration(browser, service, service.finished)
    events = service.client.stored_events(service.finished)
    browser.wait_for(f"document.querySelectorAll('.log li').length === {len(events)}")
    clocks = browser.evaluate("[...document.querySelectorAll('.log time')].map((one) => one.textContent)")
    assert clocks == [f"{event.at.astimezone(ZoneInfo(ZONE)):%H:%M:%S}" for event in events]
    assert f"all times in {ZONE}" in browser.evaluate("document.querySelector('.state').innerText").replace(
        "Calcutta", "Kolkata"
    )
    copied = browser.evaluate(
        "(() => { const lines = document.querySelector('.log ol'), clipboardData = new DataTransfer();"
        "getSelection().selectAllChildren(lines);"
        "lines.dispatchEvent(new ClipboardEvent('copy', { clipboardData, cancelable: true }));"
        "return clipboardData.getData('text/plain'); })()"
    )
    assert copied.splitlines() == [" ".join(render_line(event).split()) for event in events]
    given = json.dumps([event.model_dump(mode="json") for event in events])
    ratios = browser.evaluate(
        "Promise.all(['log', 'dom'].map((name) => import(new URL(`web/${name}.js`, document.baseURI))))"
        f".then(([{{ Log }}, {{ el }}]) => {{ const events = Array.from({{ length: 2000 }}, (_, i) => {given}[i % 2]);"
        "const timed = (task) => { const start = performance.now(); task(); return performance.now() - start; };"
        "const line = (event) => el('li', {}, ...Object.values(event).map((one) => el('span', { title: one }, one)));"
        "return [0, 0, 0].map(() => 1 / timed(() => el('ol', {}, events.map(line))) "
        "* timed(() => new Log().update(events, null, true))); })"
    )
    assert min(ratios) < 3, "what it costs beside its elements would let a long log freeze the page"


def test_a_view_tells_variants_and_states_apart(browser: Chromium, service: Service) -> None:
    open_exploration(browser, service, service.finished)
    exploration = service.client.get(service.finished).model_dump(mode="json")
    trials = [trial.model_dump(mode="json") for trial in service.client.trials(service.finished)]
    events = [event.model_dump(mode="json") for event in service.client.stored_events(service.finished)]
    own = [event for event in events if "recommendation" in event["data"]]
    other = json.loads(json.dumps(own))
    for event in other:
        event["data"]["recommendation"]["candidate"]["num_query_groups"] = 1
    running = {**exploration, "state": "running", "answer": None}
    dots, summary, text = browser.evaluate(
        "import(new URL('web/exploration.js', document.baseURI)).then(async ({ ExplorationView }) => {"
        "const root = document.body.appendChild(document.createElement('main')), view = new ExplorationView(root);"
        f"const trials = {json.dumps(trials)}, events = {json.dumps([*other, *events])};"
        f"for (const one of [{json.dumps(running)}, {json.dumps(exploration)}]) {{ view.update(one, trials, events);"
        "await new Promise((done) => setTimeout(done, 600)); } view.close(); root.remove();"
        "return [root.querySelectorAll('.dot').length, view.log.summary.textContent, view.answer.textContent]; })"
    )
    assert dots == len(own), "the confidence of another variant is not of this chart"
    assert "events" in summary and "so far" not in summary
    assert text.startswith(f"Answer{exploration['text']['title']}")
    assert all(row["text"] in text for row in exploration["text"]["rows"] if row["importance"] != "brief")
    place = browser.evaluate(
        "import(new URL('web/trials_table.js', document.baseURI)).then(({ TrialsTable }) => {"
        "const table = new TrialsTable(); document.querySelector('main').append(table.root);"
        f"const trials = {json.dumps(trials)}; table.update(trials); table.root.querySelector('button').focus();"
        "scrollTo(0, 0); table.update(trials); return [scrollY, table.root.contains(document.activeElement)]; })"
    )
    assert place == [0, True], "a new trial does not scroll to the column that has the focus"


def test_what_no_trial_took_is_idle_and_a_replay_has_no_idle_time(browser: Chromium, service: Service) -> None:
    log_in(browser, service)

    def sums(seconds: float, *, started: float = 0.0) -> tuple[dict[str, float], list[float]]:
        phases = {"process_start": started, "build": 1, "warm_up": 2, "timed": 3, "messaging": 0.5}
        trials = [
            {"number": number, "kind": kind, "seconds": seconds, "measurement": {"phases": phases}}
            for number, kind in enumerate(("components", "whole_model"))
        ]
        moments = [(102, 5, {}), (201, 15, {"trial": 0}), (203, 25, {"trial": 1}), (401, 30, {})]
        events = [{"code": code, "at": f"2026-01-01T00:00:{at:02}Z", "data": data} for code, at, data in moments]
        found = browser.evaluate(
            "import(new URL('web/trial_figures.js', document.baseURI)).then(({ timelineOf }) => {"
            f"const {{ sums, spans }} = timelineOf({json.dumps(trials)}, {json.dumps(events)}, null, "
            "'2026-01-01T00:00:30Z');"
            "return [sums, spans.map(({ start }) => start)]; })"
        )
        return dict(found[0]), found[1]

    common = {"build": 2, "warm-up": 4, "measure": 3, "whole model": 3}
    assert sums(8, started=90) == ({**common, "start": 3, "rest": 1, "idle": 9}, [2, 12])
    assert sums(8) == ({**common, "rest": 4, "idle": 9}, [2, 12])
    assert sums(0.1, started=5) == ({**common, "start": 10, "rest": 1}, [0, 11.5])
    assert sums(12, started=5) == ({**common, "start": 10, "rest": 1}, [0, 11.5]), "it would begin before the search"
    assert sums(10) == ({**common, "rest": 8, "idle": 5}, [0, 10])


def test_a_probability_is_no_certainty(browser: Chromium, service: Service) -> None:
    log_in(browser, service)
    said = "import(new URL('web/format.js', document.baseURI)).then((all) => [1, 0.9996, 0.971, 0].map(all.likely))"
    assert browser.evaluate(said) == ["99%", "99%", "97%", "1%"]


def test_what_is_above_the_limit_with_its_reserve_is_neither_best_nor_on_the_front(
    browser: Chromium, service: Service
) -> None:
    log_in(browser, service)
    exploration = service.client.get(service.finished)
    best, report = exploration.recommendation, exploration.report
    stored = service.client.trials(service.finished)
    assert best is not None and report is not None
    ran = [trial for trial in stored if trial.tokens_per_second and trial.candidate != best.candidate]
    over = max(ran, key=lambda trial: trial.peak_bytes or 0)
    assert over.peak_bytes is not None and over.peak_bytes > best.expected_peak_bytes
    required = required_bytes(over.peak_bytes, report.hardware, "default")
    documents = [trial.model_dump(mode="json") for trial in stored]
    documents[stored.index(over)]["tokens_per_second"] = 1e6
    for limit, fits in ((required + 2**16, True), (required - 2**16, False)):
        known = best.model_copy(update={"memory_limit_bytes": limit}).model_dump(mode="json")
        front, coloured, row = browser.evaluate(
            "Promise.all(['trial_figures', 'charts', 'trials_table'].map((name) => "
            "import(new URL(`web/${name}.js`, document.baseURI))))"
            ".then(([{ withLimit }, { frontChart, heatMap }, { TrialsTable }]) => { "
            f"const best = {json.dumps(known)}, trials = withLimit({json.dumps(documents)}, best);"
            "const table = new TrialsTable(); table.update(trials);"
            "return [frontChart({ trials, best, width: 600 })[0].ariaLabel, "
            "[...heatMap({ trials, best }).querySelectorAll('.heat')].map((one) => one.textContent).join(), "
            f"[...table.body.rows].find((row) => row.cells[0].textContent === '{over.number}').textContent]; }})"
        )
        assert ("1,000,000" in front) is fits
        assert ("1,000k" in coloured) is fits
        assert ("above the limit with its reserve" in row) is not fits
