"""Kernels that are built before a device needs them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bexp.kernels.builds import Build, Experts, Order, run
from bexp.kernels.launcher import Blocks, Launch, Pointer
from bexp.kernels.shapes import ExpertsShape
from tests.waits import PATIENCE_SECONDS

SHAPE = ExpertsShape(hidden_size=128, ffn_hidden_size=64, num_experts=8, top_k=2, dtype=torch.bfloat16)
ORDER = Order((Experts(SHAPE, (256, 512), transposed=True),), (9, 0), multiprocessors=132, processes=2)


def test_an_order_is_read_as_it_was_written() -> None:
    assert Order.decode(ORDER.encode()) == ORDER


class Kernel:
    """A kernel that says what it is compiled for."""

    params = tuple(
        SimpleNamespace(name=name, default=None, is_constexpr=name.isupper(), do_not_specialize=name == "num_pairs")
        for name in ("x", "w_desc", "size", "num_pairs", "BLOCK")
    )

    @staticmethod
    def run(**arguments: Any) -> Any:
        return arguments


FORMATS = {"x": torch.float16, "w": torch.bfloat16}


@pytest.fixture
def no_triton_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("triton") is None:
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))


def build(offset: int = 0, size: int = 32, num_pairs: int = 4, block: int = 64) -> Build:
    given = {"x": Pointer("x", offset), "w_desc": Blocks(Pointer("w"), (4, 8), (2, 8)), "size": size}
    return Build(Launch(Kernel, (3, 2), {**given, "num_pairs": num_pairs, "BLOCK": block}, num_warps=4), FORMATS)


@pytest.mark.usefixtures("no_triton_needed")
def test_a_kernel_is_built_for_formats_and_without_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Blocks, "describe", lambda self, base: base.dtype)
    built = build(offset=32).run()
    assert built.pop("x").dtype == torch.float16
    numbers = {"size": 32, "num_pairs": 4, "BLOCK": 64}
    assert built == {"w_desc": torch.bfloat16, **numbers, "grid": (3, 2), "warmup": True, "num_warps": 4}


@pytest.mark.usefixtures("no_triton_needed")
def test_launches_that_triton_compiles_alike_are_one_build() -> None:
    first = build()
    assert first.variant == build(offset=16, size=64, num_pairs=5).variant
    for other in (build(size=33), build(size=1), build(block=32), replace(first, dtypes={**FORMATS, "x": torch.int32})):
        assert first.variant != other.variant


@pytest.mark.parametrize("error", [OSError("no space left"), None])
def test_a_kernel_that_cannot_be_compiled_is_known(error: Exception | None) -> None:
    def compiled() -> Any:
        if error is not None:
            raise error
        return SimpleNamespace(src=None, metadata=None)

    assert run(SimpleNamespace(run=compiled)) is (error is None)  # type: ignore[arg-type]  # stands for a build


@pytest.mark.slow
def test_all_kernels_of_experts_are_built_without_a_device_and_once(tmp_path: Path) -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}

    def built() -> set[str]:
        command = [sys.executable, "-m", "bexp.kernels.builds"]
        subprocess.run(command, input=ORDER.encode(), env=environment, text=True, timeout=PATIENCE_SECONDS, check=True)
        return {path.stem for path in tmp_path.rglob("*.cubin")}

    names = built()
    assert names >= {"gate_up_gemm_kernel", "differentiate_hidden_kernel", "rows_kernel", "weights_kernel", "sum_pairs"}
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    assert built() == names
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")} == before
