"""The hash of the kernels' code: it changes with what runs, and with nothing else."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from benchmarks import environment as digest
from benchmarks.environment import statements

SOURCE = '''
"""A module."""

TILE = 64
"""Rows."""


@jit
def kernel(x, step: int = 1):
    """Doubles."""
    return f"{x * 2:>{TILE}}"


@kernel.register_fake
def _(x):
    return x.new_empty(x.shape)
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("TILE = 64", "TILE = 128"),
        ("TILE = 64", "TILE = None"),
        ("x * 2", "x * 3"),
        ("x * 2", "x + 2"),
        ("@jit", "@interpreted"),
        ("step: int = 1", "step: int = 2"),
        (":>", ":<"),
        ("kernel.register_fake", "kernel.register_kernel"),
    ],
)
def test_what_runs_changes_the_hash(old: str, new: str) -> None:
    assert old in SOURCE
    assert statements(SOURCE.replace(old, new)) != statements(SOURCE)


def test_all_versions_of_python_find_one_hash() -> None:
    """The tables of one machine serve all its environments; the hash is of Python 3.11, 3.12 and 3.13."""
    written = "\n".join(statements(SOURCE))
    assert sha256(written.encode()).hexdigest()[:16] == "326baa82c408390d"


def test_it_does_not_matter_where_a_statement_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest_of(**files: str) -> str:
        folder = tmp_path / "kernels" / "experts"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.py"):
            old.unlink()
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        monkeypatch.setattr(digest, "_EXPERTS", folder)
        return digest.kernels_digest.__wrapped__()

    one = digest_of(all="import torch\nTILE = 64\nROWS = 2\n")
    assert digest_of(tiles="TILE = 64\n", rows="from tiles import TILE\nROWS = 2\n") == one
    assert digest_of(all="TILE = 64\nROWS = 3\n") != one
