"""The commands that the README shows exist."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main

from api.cli import app
from benchmarks.readme import fill

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
CODE = "\n".join(re.findall(r"```\w*\n(.*?)```", TEXT, flags=re.DOTALL) + re.findall(r"`([^`\n]+)`", TEXT))


def test_make_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    shown = set(re.findall(r"^\$? ?make ([a-z]+)", CODE, flags=re.MULTILINE))
    assert shown <= targets


def test_commands() -> None:
    command = typer.main.get_command(app)
    shown = set(re.findall(r"^\$? ?bexp ([a-z]+)", CODE, flags=re.MULTILINE))
    assert shown <= set(getattr(command, "commands", {}))


def test_files() -> None:
    for path in re.findall(r"\b(?:examples|deploy|benchmarks)/[\w./-]+\w", CODE):
        assert (ROOT / path).exists(), path


def test_figures_are_those_of_the_results() -> None:
    assert fill(TEXT) == TEXT
