"""Runs the tests of optimizers, quantised weights and adapters whose packages the ordinary tests do not have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "workers" / "targets" / "transformers"
TESTS = [str(FOLDER / f"test_{name}.py") for name in ("optimizers", "quantized", "adapters")]
TESTS.append(str(ROOT / "tests" / "bexp" / "trainer" / "test_muon_optimizer.py"))

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(pytest.main(["-q", "-W", "ignore", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *TESTS]))
