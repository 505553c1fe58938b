"""What tests do in the page: log in, open a view, and look for what a person needs."""

from __future__ import annotations

from tests.browser.chromium import Chromium
from tests.browser.conftest import Service

ENTER, TAB = ("Enter", 13, "\r"), ("Tab", 9)


def log_in(browser: Chromium, service: Service, token: str | None = None, *, at: str = "", width: int = 1280) -> None:
    """Open the page and give a token to its login."""
    browser.open(f"{service.url}/{at}", width=width)
    browser.wait_for("document.activeElement.id === 'token'")
    browser.type(token or service.token)
    browser.press(*ENTER)
    browser.wait_for("!document.getElementById('login').open")


def open_exploration(browser: Chromium, service: Service, job_id: str, width: int = 1280) -> None:
    log_in(browser, service, at=f"#/explorations/{job_id}", width=width)
    browser.wait_for("document.querySelector('.headline strong')")


def button(verb: str) -> str:
    """The visible button of an exploration that begins with `verb`, in JavaScript."""
    shown = "[...document.querySelectorAll('.actions > button:not([hidden])')]"
    return f"{shown}.find((button) => button.textContent.startsWith('{verb}'))"


def count(browser: Chromium, selector: str) -> int:
    number: int = browser.evaluate(f"document.querySelectorAll('{selector}').length")
    return number


CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const luminance = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((byte) => byte / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
      .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  };
  const grounds = (node) => node ? [...grounds(node.parentElement), getComputedStyle(node).backgroundColor] : [];
  return [...document.querySelectorAll('main *, .bar *')].filter((node) => node.checkVisibility()
    && !node.closest('.hidden, option, title')
    && [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim()))
    .map((node) => {
      const under = grounds(node);
      const shown = getComputedStyle(node)[node.closest('svg') ? 'fill' : 'color'];
      const [a, b] = [luminance(under), luminance([...under, shown])].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), node.textContent.slice(0, 40)];
    }).sort((x, y) => x[0] - y[0])[0];
})()"""
"""The smallest contrast of a text with what is under it, and the text."""
