"""Runs the tests of kernels that need Triton: they are compiled, and run in its interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    asked = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "--numprocesses=4", "--rootdir", str(ROOT)]
    raise SystemExit(pytest.main([*asked, str(ROOT / "tests" / "bexp" / "kernels")]))
