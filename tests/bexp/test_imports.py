from __future__ import annotations

import subprocess
import sys

import pytest


def imported(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after `statement`."""
    script = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


@pytest.mark.parametrize("package", ["bexp", "bexp.kernels", "bexp.measure", "bexp.measure.nvml"])
def test_importing_the_package_loads_no_torch(package: str) -> None:
    assert not imported(f"import {package}") & {"torch", "triton", "transformers", "pydantic"}


def test_the_kernels_and_the_measuring_load_neither_the_service_nor_triton_nor_transformers() -> None:
    modules = "bexp.kernels.attention, bexp.kernels.experts.registry, bexp.measure.memory, bexp.measure.device_monitor"
    unwanted = {"explorer", "storage", "workers", "api", "transformers", "pydantic", "sqlalchemy", "triton"}
    assert not imported(f"import {modules}") & unwanted
