"""What README.md and docs/ show exists: commands, files, links and generated tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from api.cli import app
from benchmarks.docs.sections import fill, pages

ROOT = Path(__file__).parents[2]
PAGES = pages()
LONGEST_README = 220


def _code(page: Path) -> str:
    text = page.read_text()
    blocks = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
    return "\n".join(blocks + re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST_README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_that_are_shown_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"^\$? ?make ([a-z]+)", _code(page), flags=re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_shown_exist(page: Path) -> None:
    known = set(getattr(typer.main.get_command(app), "commands", {}))
    assert set(re.findall(r"^\$? ?bexp ([a-z]+)", _code(page), flags=re.MULTILINE)) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_modules_that_are_shown_exist(page: Path) -> None:
    code = _code(page)
    # What follows the name of another repository, such as `pytorch/torchtitan`, is a file of that one. A command writes
    # what follows its `--out`.
    for path in re.findall(
        r"(?<!torchtitan )(?<!--out )\b(?:examples|deploy|benchmarks|tests|bexp|explorer|workers)/[\w./-]+\w", code
    ):
        assert "NAME" in path or (ROOT / path).exists(), path
    for module in re.findall(r"-m (benchmarks[\w.]*)", page.read_text()):
        folder = ROOT / module.replace(".", "/")
        assert folder.with_suffix(".py").exists() or (folder / "__main__.py").exists(), module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        slugs = {
            re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
            for line in (found.read_text().splitlines() if found.suffix == ".md" else ())
            if line.startswith("#")
        }
        assert not heading or heading in slugs, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_are_current(page: Path) -> None:
    text = page.read_text()
    assert fill(text) == text, "run python -m benchmarks.docs"
