"""What `-h` says of each command."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from bexp.api.cli import app
from bexp.api.cli.commands import COMMANDS, load_command


def commands() -> list[tuple[str, ...]]:
    """Every command, those of groups included."""
    found: list[tuple[str, ...]] = []
    for name in COMMANDS:
        found += [(name, inner) for inner in getattr(load_command(name), "commands", {})] or [(name,)]
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_command_says_first(name: str) -> None:
    assert COMMANDS[name][1] == load_command(name).help.split("\n\n")[0]


def test_the_list_of_commands_needs_neither_the_client_nor_the_formats() -> None:
    script = "import sys; from bexp.api.cli import app; app(['-h'], standalone_mode=False); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"httpx", "numpy", "pydantic", "yaml", "sqlalchemy"} & set(loaded)


def test_the_best_is_printed_without_numpy() -> None:
    script = "import sys, api.cli.best; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "sqlalchemy", "bexp.explorer.formats.request"} & set(loaded)


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


@pytest.mark.parametrize("group", ["", "db", "token", "quota"])
def test_a_group_without_a_command_shows_its_commands(group: str) -> None:
    done = CliRunner().invoke(app, group.split())
    assert "completion" not in done.output
    inner = COMMANDS if not group else getattr(load_command(group), "commands", {})
    assert inner
    assert all(re.search(rf"^│ {name} ", done.output, re.MULTILINE) for name in inner)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_options_of_an_exploration_are_in_groups_with_room_for_their_texts(columns: int) -> None:
    text = CliRunner().invoke(app, ["explore", "-h"], env={"COLUMNS": str(columns)}).output
    panels = re.findall(r"^╭─ ([A-Z][\w ]*) ─", text, re.MULTILINE)
    assert panels == ["Arguments", "Options", "Batch and texts", "What may be chosen", "Training", "Search", "Output"]
    option = re.compile(r"^│ --[a-z-]+ +(?:-\w +)?(?:<\w+>|[A-Z=]+)? +(?=\S)")
    begins = [match.end() for line in text.splitlines() if (match := option.match(line))]
    assert len(begins) >= 25
    assert max(begins) <= 38, "the texts begin in the left half"
    assert max(map(len, text.splitlines())) <= columns
    assert len(text.splitlines()) <= (110 if columns == 80 else 80)


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_no_value_is_named_as_its_option(command: tuple[str, ...]) -> None:
    """typer 0.27 takes an option `--mode` whose value is called MODE for `--MODE`."""
    found = load_command(command[0])
    for inner in command[1:]:
        found = found.commands[inner]
    assert not [each.opts for each in found.params if f"--{each.metavar}".lower() in each.opts]
