"""The tables beside the raw results are current, and pages state no figure that they do not have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest

from benchmarks import gains
from benchmarks.environment import ROOT
from benchmarks.moe_turns import compare_with_dense
from benchmarks.result_tables import RESULTS, Row, load, pages

GOAL = re.compile(r"\([^()]*goal[^()]*\)|; goal: [\d.%]+")
NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?:e-\d+)?[%x]?(?![\w.]*\d)")
FIGURE = re.compile(
    r"(?<!Triton )(?<!torch )(?<![\w.,=-])"
    r"(?:\d[\d,]*\.\d+(?:e-\d+)?[%x]?|\d[\d,]*(?:%|x|(?= s\b| ms\b| GiB| of \d|k\b)))"
)
LINK = re.compile(r"\]\((?:\.\./)?benchmarks/results/(\w+)\.md(?:#([\w-]+))?\)")
WHY_NOT = "why-not-the-largest-batch"
UNRECORDED = "not recorded"
"""A page says so of a figure that no result has."""


def tables(name: str, heading: str | None = None) -> str:
    """The text of a page of tables, or of one section."""
    text = (RESULTS / f"{name}.md").read_text()
    if heading is None:
        return text
    sections = {
        re.sub(r"[^\w -]", "", part.partition("\n")[0].lower()).replace(" ", "-"): part for part in text.split("\n## ")
    }
    return sections[heading]


def statements(text: str) -> Iterator[tuple[str, str]]:
    """Every sentence with figures, and the tables that its paragraph links, or else its section."""
    for section in text.split("\n## "):
        for block in re.split(r"\n\n|\n(?=- |\| )", section):
            links = LINK.findall(block) or LINK.findall(section)
            source = "\n".join(tables(name, heading or None) for name, heading in links)
            for sentence in re.split(r"(?<=[.:;]) ", GOAL.sub("", " ".join(block.split()))):
                if source and UNRECORDED not in sentence:
                    yield sentence, source


def unknown(text: str) -> list[str]:
    """The figures of a text that the tables it links do not have."""
    return [
        f"{figure} in: {sentence}"
        for sentence, source in statements(text)
        for figure in FIGURE.findall(sentence)
        if figure not in set(NUMBER.findall(source))
    ]


def test_the_pages_of_tables_are_current() -> None:
    stale = [path.name for path, text in pages().items() if path.read_text() != text]
    assert stale == [], "run python -m benchmarks.result_tables"


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{name}.md" for name in ("benchmarks", "targets", "operations", WHY_NOT))]
)
def test_the_figures_of_a_page_are_in_the_tables_that_it_links(page: str) -> None:
    assert not unknown((ROOT / page).read_text())


def test_a_figure_that_no_table_has_is_found() -> None:
    link = "[Tables](../benchmarks/results/search.md#gains)"
    assert not unknown(f"The best gains 1.04x (goal: 7.00x) at most, on 11 of 14 tables. {link}.")
    assert unknown(f"The best gains 1.77x at most. {link}.")
    assert not unknown(f"It gains 1.77x (not recorded). {link}.")


def summarize(of: Callable[[list[Row]], Row], rows: str) -> Callable[[Row], None]:
    """What computes the summary of a result again."""
    return lambda result: result.update(summary=of(result[rows]))


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("h200-gains", summarize(gains.summarize, "rows")),
        ("h100-moe-turns", lambda result: compare_with_dense(result["rows"])),
    ],
)
def test_what_a_result_sums_up_follows_from_its_rows(name: str, again: Callable[[Row], None]) -> None:
    result = deepcopy(load(name))
    again(result)
    assert result == load(name)
