"""What a team does in the page: search, submit, follow, compare, and copy the next command."""

from __future__ import annotations

import pytest

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.request.request import Budget
from tests.browser.chromium import Chromium
from tests.browser.conftest import Service
from tests.browser.views import CONTRAST, ENTER, count, log_in
from tests.workers.replay.samples import request

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
        browser.wait_for(f"document.documentElement.scrollWidth <= {width}")
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
    assert column(browser, "tokens/s") == [f"{best.recommendation.expected_tokens_per_second:,.0f}"]
    assert column(browser, "gain") == [f"{best.recommendation.performance:.2f}x"]
    assert "H200" in column(browser, "device")[0]
    assert column(browser, "duration")[0].endswith("\xa0s")
    colour = "getComputedStyle(document.querySelector('.badge')).color"
    is_provisional = browser.evaluate(colour)
    assert (
        browser.evaluate(f"(document.querySelector('.badge').className = 'badge succeeded', {colour})")
        != is_provisional
    )
    check_view(browser)
    search(browser, "nothing-like-it")
    browser.wait_for(f"{ROWS}.length === 0 && document.body.innerText.includes('There are none')")
    search(browser, "local")
    browser.wait_for(f"{ROWS}.length > 1")


def test_explorations_are_compared_side_by_side(browser: Chromium, service: Service) -> None:
    other = finish(service, memory_limit_gib=20, seed=22, batch_size=33)
    log_in(browser, service)
    browser.wait_for(f"{ROWS}.length > 1")
    boxes = "[...document.querySelectorAll('.list tbody input')]"
    assert browser.evaluate("document.querySelector('a.button').hidden")
    for job_id in (service.finished, other):
        browser.evaluate(f"document.querySelector('.list [data-id=\"{job_id}\"] input').focus()")
        browser.press(" ", 32, " ")
    assert browser.evaluate(f"{boxes}.filter((box) => box.checked).length") == 2
    browser.evaluate("document.querySelector('a.button').click()")
    browser.wait_for(
        "document.querySelector('.compared') && !document.querySelector('.compared').innerText.includes('…')"
    )
    shown = "[...document.querySelectorAll('.compared tbody tr')].filter((row) => row.checkVisibility())"
    rows = dict(browser.evaluate(f"{shown}.map((row) => [row.cells[0].firstChild.textContent, row.className])"))
    assert rows["memory_limit_gib"] == "differs field"
    assert rows["device"] == ""
    assert "model.hidden_size" not in rows, "what is the same is hidden"
    before = len(rows)
    compared = service.client.connection.request("GET", f"/v1/explorations/{service.finished}/comparison?other={other}")
    text = browser.evaluate("document.querySelector('.compared').innerText")
    assert f" likely; {compared['speedup']:.3f}x" in text
    cells = {
        name: browser.evaluate(f"{shown}.find((row) => row.innerText.startsWith('{name}')).innerText").split("\t")[1:]
        for name in ("candidate for", "its tokens/s", "faster than")
    }
    sides = [compared["a"], compared["b"]]
    assert cells["candidate for"] == [Candidate(**side["candidate"]).describe() for side in sides]
    assert cells["its tokens/s"] == [f"{side['tokens_per_second']:,.0f}" for side in sides]
    shown_ratio = float(cells["faster than"][1].split("; ")[1].partition("x")[0])
    a, b = (float(text.replace(",", "")) for text in cells["its tokens/s"])
    assert shown_ratio == pytest.approx(b / a, abs=1e-3), "it is that of the figures above it"
    peaks = browser.evaluate(f"{shown}.find((row) => row.innerText.startsWith('peak')).innerText").split("\t")[1:]
    found = [service.client.get(job_id) for job_id in (service.finished, other)]
    bests = [one.recommendation for one in found if one.recommendation]
    assert bests[1].for_batch.candidate != bests[1].candidate
    assert peaks == [f"{best.expected_peak_bytes / 2**30:.1f}\xa0GiB" for best in bests]
    browser.evaluate("document.querySelector('main label input').click()")
    assert browser.evaluate(f"{shown}.length") > before
    check_view(browser)
    assert browser.problems == [] or all("401" in problem for problem in browser.problems)
    browser.evaluate("location.hash = '#/compare/one'")
    browser.wait_for("document.querySelector('.trouble').innerText.includes('Choose two to 6')")
    assert count(browser, ".compared") == 0


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
