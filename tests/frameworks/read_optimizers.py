"""Runs the tests of optimizers whose packages the ordinary tests do not have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST = ROOT / "tests" / "workers" / "targets" / "transformers" / "test_optimizers.py"

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(pytest.main(["-q", "-W", "ignore", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(TEST)]))
