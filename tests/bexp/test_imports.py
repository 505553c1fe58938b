from __future__ import annotations

import subprocess
import sys

import pytest


def imported(statement: str) -> set[str]:
    """The top-level packages, and those right below `bexp`, that a fresh interpreter has loaded after `statement`."""
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names = [name.split(".") for name in found.stdout.split()]
    return {name[0] for name in names} | {".".join(name[:2]) for name in names if name[0] == "bexp"}


@pytest.mark.parametrize("package", ["bexp", "bexp.kernels", "bexp.measure", "bexp.measure.nvml"])
def test_importing_the_package_loads_no_torch(package: str) -> None:
    assert not imported(f"import {package}") & {"torch", "triton", "transformers", "pydantic"}


def test_exploring_a_configuration_loads_no_torch_and_no_service() -> None:
    unwanted = {"torch", "sqlalchemy", "bexp.storage", "bexp.workers", "bexp.api"}
    assert not imported("import bexp.config_exploration") & unwanted


def test_the_kernels_and_the_measuring_load_no_service_no_triton_no_transformers_and_no_compiler() -> None:
    kernels = "bexp.kernels.attention, bexp.kernels.router, bexp.kernels.experts.registry"
    unwanted = {"bexp.storage", "bexp.workers", "bexp.api", "transformers", "pydantic", "sqlalchemy", "triton"}
    compiler = {"sympy"}  # torch's compiler imports it, and torch itself does not
    assert not imported(f"import {kernels}, bexp.measure.memory_meters, bexp.measure.timing") & (unwanted | compiler)
