"""A dimension is one file, its half with torch and its entries of one list: a toy one, in a copy of the product."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

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


def test_a_toy_dimension_is_known_everywhere(tmp_path: Path) -> None:
    for name in ("explorer", "storage", "workers", "api", "bexp"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    shutil.copy(TOY / "dimension.txt", tmp_path / "explorer" / "dimensions" / "toy.py")
    shutil.copy(TOY / "set_up.txt", tmp_path / "bexp" / "transformers" / "toy.py")
    listing = tmp_path / "explorer" / "dimensions" / "candidate.py"
    text = listing.read_text()
    for line, added in ENTRIES:
        assert text.count(line) == 1, line
        text = text.replace(line, added + line if line.startswith("from ") else line + added)
    listing.write_text(text)
    run(tmp_path, "-m", "tests.explorer.dimensions.toy.walk", str(tmp_path))
    assert "toys" in run(tmp_path, "-c", "from bexp.api.cli import main; main()", "explore", "--help")


def test_a_dimension_without_its_half_with_torch_is_refused_at_import(tmp_path: Path) -> None:
    """Nobody measures the plain code under the name of a value."""
    shutil.copytree(ROOT / "explorer", tmp_path / "explorer", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "bexp", tmp_path / "bexp", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TOY / "dimension.txt", tmp_path / "explorer" / "dimensions" / "toy.py")
    listing = tmp_path / "explorer" / "dimensions" / "candidate.py"
    text = listing.read_text()
    for line, added in ENTRIES:
        text = text.replace(line, added + line if line.startswith("from ") else line + added)
    listing.write_text(text)
    code = "try:\n import bexp.transformers.set_up\nexcept TypeError as error:\n print(error)"
    assert "nothing sets toy on a model: write bexp/transformers/toy.py" in run(tmp_path, "-c", code)
