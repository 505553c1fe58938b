"""What a team does in the page: search, submit, wait, follow, compare, and copy the next command."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.request.request import Budget
from bexp.storage.tables import jobs
from bexp.storage.workers import forget_worker, register_worker
from tests.browser.chromium import Chromium
from tests.browser.conftest import Service
from tests.browser.views import CONTRAST, ENTER, count, log_in
from tests.contracts.samples import make_worker
from tests.workers.replay.samples import request

pytestmark = pytest.mark.slow(together="browser")

ON_SCREEN = "(one) => one.getBoundingClientRect().right <= document.documentElement.clientWidth"
DIFFERENCES = (
    "[...document.querySelectorAll('.differ tbody tr')].map((row) => [...row.cells].map((one) => one.innerText))"
)
ROWS = "[...document.querySelectorAll('.list tbody tr')]"


def column(browser: Chromium, name: str) -> list[str]:
    """The texts of one column of the list."""
    head = "[...document.querySelectorAll('.list thead th')].map((cell) => cell.textContent)"
    at = browser.evaluate(head).index(name)
    found: list[str] = browser.evaluate(f"{ROWS}.map((row) => row.cells[{at}].textContent)")
    return found


def finish(service: Service, **changes: object) -> str:
    """Explore a request to its end."""
    job_id = service.queue.enqueue(request(**changes))[0].id
    assert list(service.client.events(job_id))
    return job_id


def search(browser: Chromium, words: str) -> None:
    browser.evaluate(f"(wanted.value = {words!r}, wanted.dispatchEvent(new Event('change')))")


def check_view(browser: Chromium, *widths: int) -> None:
    """Check that a view fits, has readable texts in both schemes, and names everything that can be used."""
    for width in widths or (390, 2560):
        browser.resize(width, 900)
        browser.wait_for("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    for dark in (False, True):
        browser.use_dark(dark)
        ratio, text = browser.evaluate(CONTRAST)
        assert ratio >= 4.5, (dark, text)
    needing = {
        *("button", "link", "image", "region", "combobox", "textbox", "searchbox", "checkbox", "spinbutton", "table")
    }
    assert [role for role, name in browser.accessible_names() if role in needing and not name.strip()] == []


def test_a_list_shows_the_answers_and_is_searched(browser: Chromium, service: Service) -> None:
    budget = Budget(confidence_target=99, max_trials=2)
    provisional = finish(service, labels={"team": "pages"}, budget=budget, verify=False, seed=21, fresh=True)
    best = service.client.get(provisional)
    assert best.recommendation is not None
    assert best.recommendation.confidence < 99
    log_in(browser, service)
    browser.wait_for(f"{ROWS}.length > 1")
    search(browser, "H200 team=PAGES")
    browser.wait_for(f"{ROWS}.length === 1")
    assert column(browser, "state") == ["provisional"]
    assert column(browser, "confidence") == [str(best.recommendation.confidence)]
    rate = f"{best.recommendation.expected_tokens_per_second:,.0f}\xa0"
    assert column(browser, "rate") == [f"{rate}tokens/s"]
    assert column(browser, "gain") == [f"{best.recommendation.performance:.2f}x"]
    assert "H200" in column(browser, "device")[0]
    assert column(browser, "duration")[0].endswith("\xa0s")
    colour = "getComputedStyle(document.querySelector('.badge')).color"
    is_provisional = browser.evaluate(colour)
    assert (
        browser.evaluate(f"(document.querySelector('.badge').className = 'badge succeeded', {colour})")
        != is_provisional
    )
    shown = "[...document.querySelector('.list tbody tr').cells].filter((cell) => cell.checkVisibility())"
    browser.resize(390, 900)
    card = browser.evaluate(
        f"{shown}.map((cell) => [cell.dataset.name, cell.innerText, cell.getBoundingClientRect().right])"
    )
    assert {("micro-batch", str(best.micro_batch_size)), ("confidence", str(best.recommendation.confidence))} <= {
        (name, text) for name, text, _ in card
    }
    assert max(right for *_, right in card) <= browser.evaluate("document.documentElement.clientWidth")
    with service.database.begin() as connection:
        connection.execute(sa.update(jobs).where(jobs.c.id == provisional).values(rate_unit="samples"))
    search(browser, "H200 team=PAGES")
    browser.wait_for(f"{ROWS}[0].innerText.includes('samples/s')")
    assert column(browser, "rate") == [f"{rate}samples/s"]
    check_view(browser)
    search(browser, "nothing-like-it")
    browser.wait_for(f"{ROWS}.length === 0 && document.body.innerText.includes('Nothing matches')")
    browser.evaluate("[...document.querySelectorAll('a')].find((one) => one.innerText === 'Show all').click()")
    browser.wait_for(f"{ROWS}.length > 1 && wanted.value === ''")
    browser.evaluate("wanted.focus()")
    browser.type(provisional[:6])
    browser.wait_for(f"{ROWS}.length === 1 && {ROWS}[0].dataset.id === '{provisional}'")
    browser.evaluate("(window.isOld = true, location.reload())")
    browser.wait_for(f"!window.isOld && document.getElementById('wanted')?.value === '{provisional[:6]}'")
    browser.wait_for(f"{ROWS}.length === 1")
    search(browser, "local")
    browser.wait_for(f"{ROWS}.length > 1")
    newest = column(browser, "submitted")
    browser.evaluate("document.querySelector('[data-column=confidence]').focus()")
    for direction in ("descending", "ascending"):
        browser.press(*ENTER)
        assert browser.evaluate("document.activeElement.closest('th').ariaSort") == direction
        found = [int(text) for text in column(browser, "confidence") if text[0].isdigit()]
        assert found == sorted(found, reverse=direction == "descending")
        assert found[0] != found[-1], "what has an order"
    assert len(column(browser, "submitted")) == len(newest)


def check_verdict(browser: Chromium, compared: dict[str, Any], said: list[str]) -> None:
    """Check that a comparison says which of two is the faster, by how much and how likely, each ratio over it."""
    speeds = [compared[side]["tokens_per_second"] for side in "ab"]
    slow, fast = sorted(zip(speeds, "AB", said, strict=True))
    probability = max(compared["probability_b_faster"], 1 - compared["probability_b_faster"])
    how = f"{fast[0] / slow[0]:.3f}x the speed of {slow[1]} ({min(99, int(100 * probability))}% likely to be faster)"
    verdict = browser.evaluate("document.querySelector('.fastest').innerText")
    assert verdict == f"{fast[1]} is the fastest: {how}."
    assert f"{slow[0] / fast[0]:.3f}x the speed of {fast[1]}" in slow[2] and "Ratios are over its speed." in fast[2]


def test_explorations_are_compared_side_by_side(browser: Chromium, service: Service) -> None:
    other = finish(service, memory_limit_gib=20, seed=22, batch_size=33)
    log_in(browser, service)
    browser.wait_for(f"{ROWS}.length > 1")
    boxes = "[...document.querySelectorAll('.list tbody input')]"
    assert browser.evaluate("document.querySelector('a.button').hidden")
    for job_id, hint in ((service.finished, ""), (other, "Tick another to compare")):
        assert browser.evaluate("document.querySelector('.actions [role=status]').textContent") == hint
        browser.evaluate(f"document.querySelector('.list [data-id=\"{job_id}\"] input').focus()")
        browser.press(" ", 32, " ")
    assert browser.evaluate(f"{boxes}.filter((box) => box.checked).length") == 2
    browser.evaluate("document.querySelector('a.button').click()")
    browser.wait_for("document.querySelectorAll('.comparison svg.plot').length === 2")
    assert browser.evaluate("document.activeElement.tagName") == "H1"
    differs = {name: values for name, *values in browser.evaluate(DIFFERENCES)}
    assert (differs["memory_limit_gib"], differs["batch_size"]) == (["24", "20"], ["64", "33"])
    assert "device.device_name" not in differs, "what is the same is not shown"
    compared = service.client.connection.request("GET", f"/v1/explorations/{service.finished}/comparison?other={other}")
    sides = [compared["a"], compared["b"]]
    best = service.client.get(other).recommendation
    assert best is not None and best.for_batch.candidate != best.candidate
    rates = browser.evaluate("[...document.querySelectorAll('.contender strong')].map((one) => one.innerText)")
    assert rates == [f"{side['tokens_per_second']:,.0f}" for side in sides]
    said = browser.evaluate("[...document.querySelectorAll('.contender')].map((one) => one.innerText)")
    for side, text in zip(sides, said, strict=True):
        assert Candidate(**side["candidate"]).describe() in text
        assert f"confidence {side['confidence']}\n" in text
    size = sides[1]["candidate"]["micro_batch_size"]
    divides = (
        f"micro-batch {size}, which divides the batch of 33; the answer is {best.candidate.micro_batch_size} for any"
    )
    assert divides in said[1]
    check_verdict(browser, compared, said)
    for index, side in enumerate(sides):  # the ring of the chart is on the candidate that has the rate above
        (point,) = (
            point for point in side["curve"] if point["micro_batch_size"] == side["candidate"]["micro_batch_size"]
        )
        assert point["tokens_per_second"] == side["tokens_per_second"]
        assert count(browser, f".comparison circle.ring.p{index}") == 1
    is_any_over = any(not point["fits"] for side in sides for point in side["curve"])
    assert ("above the limit with its reserve" in browser.evaluate("document.querySelector('.legend').innerText")) is (
        is_any_over
    )
    total = "[...document.querySelectorAll('.comparison .parts .sum td')].map((one) => Number(one.innerText))"
    assert browser.evaluate(total) == [round(side["required_bytes"] / 2**30, 2) for side in sides]
    check_view(browser, 2560, 390)
    assert browser.problems == [] or all("401" in problem for problem in browser.problems)

    browser.resize(390, 900)  # four answers
    four = (
        service.finished,
        other,
        finish(service, seed=25, batch_size=32),
        finish(service, seed=26, recompute=["full"]),
    )
    browser.evaluate(f"location.hash = '#/compare/{','.join(four)}'")
    browser.wait_for("document.querySelectorAll('.contender strong').length === 4")
    narrow = "[...document.querySelectorAll('main :is(td, th, p, h2)')].filter((one) => one.checkVisibility() && "
    assert browser.evaluate(f"{narrow}one.innerText.length > 12 && one.clientWidth < 60).length") == 0
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    browser.evaluate("location.hash = '#/compare/one'")
    browser.wait_for("document.querySelector('.trouble').innerText.includes('Choose two to 6')")
    assert count(browser, ".compared") == 0


def test_one_without_an_answer_says_why_and_an_unknown_address_says_so(browser: Chromium, service: Service) -> None:
    failed = finish(service, memory_limit_gib=6, micro_batch_size=[16], recompute=["none"], seed=28)
    log_in(browser, service, at=f"#/compare/{service.finished},{failed}")
    browser.wait_for("document.querySelectorAll('.contender strong').length === 1")
    said = browser.evaluate("document.querySelector('main').innerText")
    assert "It has no answer: no candidate fits" in said and "false" not in said.split("What differs")[0]
    differs = {name: values for name, *values in browser.evaluate(DIFFERENCES)}
    assert differs["memory_limit_gib"] == ["24", "6"]
    assert [problem for problem in browser.problems if "401" not in problem] == []
    browser.evaluate(f"location.hash = '#/compare/{service.finished},none'")
    browser.wait_for("document.title.startsWith('No such exploration') && document.activeElement.tagName === 'H1'")
    assert "None has the id none. List the explorations." in browser.evaluate(
        "document.querySelector('main').innerText"
    )
    browser.evaluate("location.hash = '#/elsewhere'")
    browser.wait_for("document.querySelector('main h1').innerText === 'No such page'")


def test_answers_of_different_models_are_compared_only_if_asked(browser: Chromium, service: Service) -> None:
    other = service.queue.enqueue(request(seed=27, labels={"model": "another"}))[0].id
    assert list(service.client.events(other))
    with service.database.begin() as connection:
        asked = connection.execute(sa.select(jobs.c.request).where(jobs.c.id == other)).scalar_one()
        asked = {**asked, "model": {**asked["model"], "name": "wider", "hidden_size": 2048}}
        connection.execute(sa.update(jobs).where(jobs.c.id == other).values(request=asked, model_name="wider"))
    log_in(browser, service, at=f"#/compare/{service.finished},{other}")
    browser.wait_for("document.querySelector('.ask button')")
    assert "different models, small and wider" in browser.evaluate("document.querySelector('.ask').innerText")
    assert count(browser, ".contender") == count(browser, "svg.plot") == 0
    check_view(browser)
    browser.evaluate("document.querySelector('.ask button').focus()")
    browser.press(*ENTER)
    browser.wait_for("document.querySelectorAll('.contender').length === 2")
    shown = browser.evaluate("document.querySelector('main').innerText")
    assert "different models, small and wider" in shown
    assert "It has no ratio to A" in shown
    assert "likely to be" not in shown and count(browser, ".fastest") == 0
    assert "model.hidden_size" in browser.evaluate("document.querySelector('details').textContent")


def test_a_form_says_beside_each_field_what_is_wrong_with_it(browser: Chromium, service: Service) -> None:
    log_in(browser, service)
    browser.evaluate("location.hash = '#/submit'")
    browser.wait_for("document.querySelectorAll('#trainer option').length > 5")
    browser.evaluate(
        "[...document.querySelectorAll('button')].find((one) => one.innerText === 'Fill in an example').click()"
    )
    browser.wait_for("document.getElementById('document').value.startsWith('model:')")
    dropped = 'new File([\'{"model": {"name": "x", "hidden_size": -4}}\'], \'config.json\')'
    browser.evaluate(
        f"(() => {{ const data = new DataTransfer(); data.items.add({dropped}); "
        "document.querySelector('form.card').dispatchEvent(new DragEvent('drop', { dataTransfer: data })); })()"
    )
    browser.wait_for("document.getElementById('document').value.includes('hidden_size')")
    check_view(browser)
    for name, value in (("batch-size", "-4"), ("seq-length", "34:08"), ("max-seconds", "0")):
        browser.evaluate(f"document.getElementById('{name}').focus()")
        browser.type(value)
    browser.evaluate("(trainer.value = 'trl', document.querySelector('form.card').requestSubmit())")
    browser.wait_for("document.querySelector('#errors li')")
    wrong = "[...document.querySelectorAll('[aria-invalid=\"true\"]')].map((one) => one.id)"
    assert browser.evaluate(wrong) == ["document", "batch-size", "seq-length", "max-seconds"]
    assert browser.evaluate("document.activeElement.id") == "document"
    assert "hidden_size" in browser.evaluate("document.getElementById('errors').innerText")
    for name, rule in (("batch-size", "greater than"), ("seq-length", "integer"), ("max-seconds", "greater than")):
        said = browser.evaluate(f"document.getElementById('{name}-error').innerText")
        assert rule in said, (name, said)
        browser.evaluate(f"document.getElementById('{name}').select()")
        browser.type({"batch-size": "064", "seq-length": "2048", "max-seconds": "5"}[name])
    check_view(browser)
    assert browser.evaluate("document.querySelector('.command code').innerText") == (
        "bexp submit config.json --batch-size 64 --seq-length 2048 --trainer trl --max-seconds 300"
    )
    browser.evaluate("(trainer.value = '', document.getElementById('document').select())")
    browser.type(request(seed=23).model_dump_json())
    browser.evaluate("document.querySelector('form.card').requestSubmit()")
    browser.wait_for("location.hash.startsWith('#/explorations/') && document.querySelector('.badge.succeeded')")
    asked = service.client.get(browser.evaluate("location.hash.split('/')[2]")).request
    assert asked is not None
    assert (asked.batch_size, asked.budget.max_seconds, asked.trainer) == (64, 300.0, None)


def test_charts_grow_while_an_exploration_runs(browser: Chromium, service: Service) -> None:
    service.hold()
    job_id = service.queue.enqueue(request(seed=24, fresh=True))[0].id
    try:
        log_in(browser, service, at=f"#/explorations/{job_id}")
        browser.wait_for("document.querySelector('.badge.running') && document.querySelector('.log li')")
        assert count(browser, "svg.plot") == 0
        moving = "['', '::before'].map((of) => getComputedStyle(document.querySelector('.badge'), of).animationName)"
        assert browser.evaluate(moving) == ["none", "breathe"], "a text that fades is not read"
        assert "0 trials, until confidence 95, 600 s of trials, or 200 trials" in browser.evaluate(
            "document.querySelector('.state').innerText"
        )
        assert "Nothing to show yet." in browser.evaluate("document.querySelector('.charts').innerText")
        assert browser.evaluate("document.querySelector('#answer-title').textContent") == "Best so far"
        assert f"bexp watch {job_id}" in browser.evaluate(
            "[...document.querySelectorAll('.command code')].map((one) => one.innerText)"
        )
        browser.evaluate("window.same = true")
    finally:
        service.profiler.gate.set()
    browser.wait_for("document.querySelector('.badge.succeeded') && document.querySelectorAll('svg.plot').length === 5")
    assert browser.evaluate("window.same"), "the view was not loaded again"
    browser.wait_for("document.querySelector('#answer-title').textContent === 'Answer'")
    assert count(browser, ".log li") == len(service.client.stored_events(job_id))
    browser.wait_for(f"document.querySelectorAll('.data tbody tr').length === {len(service.client.trials(job_id))}")
    browser.wait_for("document.querySelector('polygon.band')")
    # The edges of the band are the figures of the trials: the middle of each pair is the trial's mark.
    edges = browser.evaluate("[...document.querySelector('polygon.band').points].map(({ x, y }) => [x, y])")
    upper, lower = edges[: len(edges) // 2], edges[len(edges) // 2 :][::-1]
    path = browser.evaluate("[...document.querySelector('.series').points].map(({ x, y }) => [x, y])")
    assert [x for x, _ in upper] == [x for x, _ in lower] == [x for x, _ in path]
    assert all(high < y < low for (_, high), (_, low), (_, y) in zip(upper, lower, path, strict=True))
    assert count(browser, "polyline.front") == count(browser, "polyline.confidence") == 1
    check_view(browser)
    browser.resize(390, 900)
    for cells in ("table.data td:nth-child(-n + 3)", ".page-head .actions > :not([hidden])"):
        assert browser.evaluate(f"[...document.querySelectorAll('{cells}')].every({ON_SCREEN})")
    tops = "[...document.querySelectorAll('NODES')].map((one) => Math.round(one.getBoundingClientRect().top))"
    assert len(set(browser.evaluate(tops.replace("NODES", ".headline > div")))) == 2, "figures stand two by two"
    boxes = ".page-head :is(button, a.button, select):not([hidden])"
    assert len(set(browser.evaluate(tops.replace("NODES", boxes)))) == 1, "actions are one row"


def test_a_queued_one_says_what_it_waits_for_and_the_workers_what_they_do(browser: Chromium, service: Service) -> None:
    queue, gpus = service.queue, [{"device": "cuda:0", "busy_share": 0.93, "temperature_celsius": 61}]
    has: dict[str, Any] = {"devices": "cuda:0", "memory_bytes": 32 << 30, "versions": {"torch": "2.13"}}
    measuring, waiting = (make_worker(f"host-{number}", **has) for number in (1, 2))
    ids = [queue.enqueue(request(seed=seed, device_kind="cpu"))[0].id for seed in (71, 72, 73)]
    assert queue.claim(measuring, among=ids[:1]) is not None
    register_worker(service.database, replace(measuring, gpus=gpus))
    register_worker(service.database, replace(waiting, held_by="cpu is in use by process 7"))
    shown = "[...document.querySelectorAll('main .card')].filter((card) => card.checkVisibility())"
    try:
        log_in(browser, service)
        browser.evaluate("(window.slow = setTimeout, window.setTimeout = (task, delay) => slow(task, delay / 20), 1)")
        browser.evaluate(f"location.hash = '#/explorations/{ids[2]}'")
        browser.wait_for("document.querySelector('.page-head .badge.queued') && document.querySelector('.log li')")
        assert browser.evaluate(f"{shown}.map((card) => card.querySelector('h2').textContent)") == ["Waiting", "Log"]
        assert "2 of 2 in the queue" in browser.evaluate(f"{shown}[0].innerText")
        queue.note_waiting(grace=timedelta(0))
        browser.wait_for(f"{shown}[0].innerText.includes('each worker that can run it is busy')")
        assert "the first worker is free" in browser.evaluate(f"{shown}[0].innerText")
        browser.wait_for("document.querySelectorAll('.log li').length === 2")
        browser.wait_for("document.querySelector('.log').parentElement.innerText.includes('2 events.')")
        check_view(browser)
        browser.evaluate("location.hash = '#/?state=queued&sort=state&up'")
        browser.wait_for(f"{ROWS}.length === 2")
        assert browser.evaluate(f"{ROWS}.map((row) => [row.dataset.id, row.querySelector('.why').innerText])") == [
            [job_id, f"{place} of 2 in the queue; each worker that can run it is busy"]
            for place, job_id in enumerate(ids[1:], 1)
        ]
        check_view(browser, 390, 1280)
        browser.evaluate(f"location.hash = '#/explorations/{ids[2]}'")
        browser.wait_for(f"{shown}[0]?.innerText.includes('2 of 2 in the queue')")
        queue.request_cancel(ids[1])
        browser.wait_for(f"{shown}[0].innerText.includes('1 of 1 in the queue')")
        browser.evaluate("location.hash = '#/workers'")
        browser.wait_for(f"document.querySelector('.data a[href$=\"{ids[0]}\"]')")
        rows = browser.evaluate("[...document.querySelectorAll('.data tbody tr')].map((row) => row.innerText)")
        row = next(row.split("\t") for row in rows if row.startswith("host-1"))
        assert row[1:3] + row[4:8] == ["measuring", f"small\n{ids[0]}\n", "A device cuda:0", "93%", "61\xa0°C", "2.13"]
        assert "host-2: cpu is in use by process 7" in browser.evaluate("document.querySelector('main ul').innerText")
        check_view(browser)
        browser.resize(390, 900)
        assert browser.evaluate(f"[...document.querySelectorAll('main td')].every({ON_SCREEN})")
    finally:
        for job_id in ids:
            queue.request_cancel(job_id)
        for name in ("host-1", "host-2"):
            forget_worker(service.database, name)


def test_a_failed_one_offers_its_remedies_as_requests_that_are_filled_in(browser: Chromium, service: Service) -> None:
    noted = {"notices": ("a key was ignored",), "seed": 74}
    failed = finish(service, memory_limit_gib=6, micro_batch_size=[16], recompute=["none"], **noted)
    known = service.client.get(failed)
    assert known.state == "failed" and known.request is not None and known.answer is not None
    first = known.answer.variants[0].remedies[0]
    log_in(browser, service, at=f"#/explorations/{failed}")
    browser.wait_for("document.querySelector('.badge.failed') && document.querySelector('.log .end')")
    actions = browser.evaluate(
        "[...document.querySelectorAll('.page-head .actions > :not([hidden])')].map((one) => one.innerText)"
    )
    assert actions == ["Edit and submit again", "Delete the exploration"]
    assert f"bexp resume {failed}" not in browser.evaluate("document.querySelector('main').innerText")
    check_view(browser)
    browser.evaluate(
        "(window.real = fetch, window.held = new Promise((done) => { window.go = done }), "
        "window.fetch = async (...given) => { await held; return real(...given); }, 1)"
    )
    browser.evaluate("[...document.querySelectorAll('.card a.button')].at(0).click()")
    browser.wait_for("document.getElementById('document')?.disabled")
    assert browser.evaluate("document.querySelector('main > [role=status]').innerText") == "Loading the request…"
    browser.evaluate("go()")
    browser.wait_for("document.getElementById('document').value.startsWith('{')")
    assert not browser.evaluate("[...document.querySelector('form.card').elements].some((one) => one.disabled)")
    assert first.change in browser.evaluate("document.querySelector('main > [role=status]').innerText")
    assert '"confidence_target"' not in browser.evaluate("document.getElementById('document').value"), "it is usual"
    browser.evaluate("document.querySelector('form.card').requestSubmit()")
    browser.wait_for(f"location.hash.startsWith('#/explorations/') && !location.hash.includes('{failed}')")
    again = service.client.get(browser.evaluate("location.hash.split('/')[2]"))
    service.queue.request_cancel(again.id)
    assert again.request == type(known.request).model_validate(
        known.request.model_dump(mode="json") | first.settings | {"notices": ()}
    )


def test_commands_are_copied_by_keyboard(browser: Chromium, service: Service) -> None:
    log_in(browser, service, at=f"#/explorations/{service.finished}")
    browser.wait_for("document.querySelector('.command button')")
    browser.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    for command in (f"bexp best {service.finished}", f"bexp report {service.finished} --out report.html"):
        browser.evaluate(f"document.querySelector('[aria-label=\"Copy {command}\"]').focus()")
        browser.press(*ENTER)
        browser.wait_for(f"window.copied === '{command}' && document.activeElement.nextSibling.innerText === 'Copied'")
    links = browser.evaluate(
        "[...document.querySelectorAll('[aria-labelledby=next-title] a')].map((one) => one.hash.slice(1))"
    )
    browser.evaluate("document.querySelector('[aria-labelledby=next-title] a').click()")
    browser.wait_for("document.getElementById('schema-Recommendation').open")
    assert [link for link in links if not browser.evaluate(f"!!document.getElementById(decodeURI('{link}'))")] == []
