"""A dimension is one file, its half with torch and its entries of one list: a toy one, in a copy of the product."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOY = Path(__file__).parent / "toy"
ENTRIES = (
    ("class Candidate(  # pydantic takes the fields of the last class first\n", "    ToyOf,\n"),
    ("class DimensionsAsked(\n", "    ToyAsked,\n"),
    ("    SETTINGS,\n", "    TOY,\n"),
    ("from bexp.explorer.dimensions.variants", "from bexp.explorer.dimensions.toy import TOY, ToyAsked, ToyOf\n"),
)
"""Lines of the list, each with what is added after or, for an import, before it."""


def run(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def copy_with_toy(folder: Path, *names: str, entries: tuple[tuple[str, str], ...] = ENTRIES) -> None:
    """Copy folders of the product, and add the toy's file and its entries of the list."""
    for name in names:
        ignored = shutil.ignore_patterns("*.pyc.*")  # what is being written; to compile all again takes seconds
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    shutil.copy(TOY / "dimension.txt", folder / "explorer" / "dimensions" / "toy.py")
    listing = folder / "explorer" / "dimensions" / "candidate.py"
    text = listing.read_text()
    for line, added in entries:
        assert text.count(line) == 1, line
        text = text.replace(line, added + line if line.startswith("from ") else line + added)
    listing.write_text(text)


def test_a_toy_dimension_is_known_everywhere(tmp_path: Path) -> None:
    copy_with_toy(tmp_path, "explorer", "storage", "workers", "api", "bexp")
    shutil.copy(TOY / "set_up.txt", tmp_path / "bexp" / "transformers" / "toy.py")
    run(tmp_path, "-m", "tests.explorer.dimensions.toy.walk", str(tmp_path))


@pytest.mark.parametrize(
    ("left_out", "module", "message"),
    [
        (None, "bexp.transformers.set_up", "nothing sets toy on a model: write bexp/transformers/toy.py"),
        ("ToyAsked,", "bexp.explorer.dimensions.candidate", "a request has no toys"),
        ("ToyOf,", "bexp.explorer.dimensions.candidate", "add the class of its field to Candidate"),
    ],
)
def test_a_place_that_is_forgotten_raises_at_import(
    tmp_path: Path, left_out: str | None, module: str, message: str
) -> None:
    """Nobody measures the plain code under the name of a value."""
    entries = tuple(entry for entry in ENTRIES if entry[1].strip() != left_out)
    copy_with_toy(tmp_path, "explorer", "bexp", entries=entries)
    code = f"try:\n import {module}\nexcept TypeError as error:\n print(error)"
    assert message in run(tmp_path, "-c", code)
