"""What README.md and docs/ show exists: commands, files, links and fields. `tests/benchmarks` has their figures."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import typer.main

import bexp
from benchmarks import request_page
from bexp.api.cli import app
from bexp.api.cli.commands import COMMANDS, load_command
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.training import Precision
from bexp.explorer.trainers.registry import FORMATS

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
OTHERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "docs/skills/bexp/SKILL.md")
PAGES = [*DOCS, *(ROOT / name for name in OTHERS)]
MOST_WORDS_OF_README = 800
MOST_WORDS_OF_DOCS = 15_700
"""Of the pages in docs/ that people write, together."""
MODEL = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256}
"""What parts of requests that are shown belong to."""
CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}

DIFFERS = re.compile(r"'[^']*'|\b[A-Z]{2,}\b|\S*\d\S*|\.\.\.|No such file or directory|Address already in use|: ")
"""What a message has in place of names and figures, what the system says, and what stands between two messages."""
GROUPS = {"targets"}
"""Groups of entry points, which are named like modules."""


def _blocks(page: Path, language: str) -> list[str]:
    """Return the blocks of code in a language; `py|python` stands for both names of one."""
    return re.findall(rf"^```(?:{language})\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _code(page: Path) -> str:
    text = page.read_text()
    blocks = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
    return "\n".join(blocks + re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MOST_WORDS_OF_README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_that_are_shown_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"^\$? ?make ([a-z]+)", _code(page), flags=re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_shown_exist(page: Path) -> None:
    known = set(getattr(typer.main.get_command(app), "commands", {}))
    assert set(re.findall(r"^\$? ?bexp ([a-z-]+)", _code(page), flags=re.MULTILINE)) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_that_are_shown_exist(page: Path) -> None:
    for line in re.findall(r"\bbexp ([a-z-]+(?: [^\n|;#`)]*)?)", _code(page)):
        name, *words = line.split()
        if name not in COMMANDS:
            continue
        command = load_command(name)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        words = words[: words.index("--")] if "--" in words else words  # what follows belongs to another command
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, f"bexp {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_requests_that_are_shown_are_accepted(page: Path) -> None:
    for block in _blocks(page, "yaml"):
        shown = load_document(block)
        if "model_type" in shown or "lora" in shown.get("training", {}):
            about = (
                {**CONFIG, "hf_seq_length": 64} if "model_type" in shown else {"hf_config": CONFIG, "hf_seq_length": 64}
            )
        else:
            about = {} if {"model", "megatron"} & set(shown) else {"model": {**MODEL, "seq_length": 64}}
        parse_request({**about, **shown})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_that_is_shown_is_python_and_what_it_takes_from_bexp_exists(page: Path) -> None:
    for block in _blocks(page, "py|python"):
        ast.parse(block)
    code = "\n".join([*_blocks(page, "py|python"), *re.findall(r"`(bexp\.[^`\n]+)`", page.read_text())])
    for name in set(re.findall(r"(?<![\w/.\"-])bexp\.([A-Za-z_]\w*)", code)) - GROUPS:
        assert hasattr(bexp, name) or importlib.util.find_spec(f"bexp.{name}"), f"bexp.{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        slugs = {
            re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
            for line in (found.read_text().splitlines() if found.suffix == ".md" else ())
            if line.startswith("#")
        }
        assert not heading or heading in slugs, target


def test_the_fields_of_a_request_are_those_of_the_schema() -> None:
    assert request_page.PAGE.read_text() == request_page.render(), "run python -m benchmarks.request_page"


def test_each_format_has_its_row_which_says_what_its_trainer_can_express() -> None:
    page = (ROOT / "docs" / "exports.md").read_text().partition("## The formats")[2]
    rows = {
        name: cells
        for first, *cells in re.findall(r"^\| (`.+?) \|" + r" (.+?) \|" * 5, page, flags=re.MULTILINE)
        for name in re.findall(r"`([\w-]+)`", first)
    }
    assert rows.keys() == FORMATS.keys()
    for name, (*_, sharding, precision) in rows.items():
        trainer = FORMATS[name].trainer
        levels = set(re.findall(r"zero\d", sharding))
        assert not levels or levels == trainer.expresses["sharding"] - {"none"}, name
        named = {one for one in get_args(Precision) if re.search(rf"\b{one}\b", precision)}
        assert named <= set(trainer.precisions), name


def test_messages_that_are_explained_are_printed_somewhere() -> None:
    printed = "\n".join(
        text for name in ("api", "bexp", "explorer", "storage", "workers") for text in _texts(ROOT / name)
    )
    page = (ROOT / "docs" / "when-something-goes-wrong.md").read_text()
    messages = [each for each in re.findall(r"^(?:- )?`([^`]+)`", page, flags=re.MULTILINE) if " " in each]
    assert len(messages) > 20
    for message in messages:
        parts = [part.strip(" :") for part in DIFFERS.split(message)]
        assert all(part in printed for part in parts), f"{parts} of {message!r}"


def _texts(folder: Path) -> Iterator[str]:
    """The literals of the modules in a folder; what formatting puts into one is left out."""
    for module in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_documents_are_short() -> None:
    words = {page.name: len(page.read_text().split()) for page in DOCS}
    del words["request.md"]  # it has a line for each field, which nobody writes
    assert sum(words.values()) <= MOST_WORDS_OF_DOCS, "shorten another sentence of docs/"


def test_the_changelog_is_short() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 40
