"""What `-h` says of each command."""

from __future__ import annotations

import re

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from api.cli import app


def commands() -> list[tuple[str, ...]]:
    """Every command, those of groups included."""
    found: list[tuple[str, ...]] = []
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]  # a group has them
        found += [(name, inner) for inner in getattr(command, "commands", {})] or [(name,)]
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_explains_itself_with_an_example_that_it_understands(command: tuple[str, ...]) -> None:
    short, long = (CliRunner().invoke(app, [*command, option], env={"COLUMNS": "100"}) for option in ("-h", "--help"))
    assert (short.exit_code, long.exit_code) == (0, 0)
    assert short.output == long.output
    examples = re.findall(r"Example: .*?bexp (.+?)\)?\s*$", short.output, re.MULTILINE)
    assert examples
    for example in examples:
        assert example.startswith(" ".join(command))
        options = re.findall(r"(--[a-z-]+)", example)
        assert all(f"{option} " in short.output.replace(example, "") for option in options)


def test_the_defaults_of_a_request_are_shown() -> None:
    text = " ".join(CliRunner().invoke(app, ["explore", "-h"], env={"COLUMNS": "250"}).output.split())
    for default in ("else 512", "else explore", "else 600.0", "else 95", "else eager", "else all of it"):
        assert f"[default: (of CONFIG, {default})]" in text
