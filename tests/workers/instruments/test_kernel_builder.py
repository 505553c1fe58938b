"""The process that builds kernels for a profiler, with a stand-in for what it runs."""

from __future__ import annotations

import stat
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bexp.kernels.builds import Experts, Order
from bexp.kernels.shapes import ExpertsShape
from bexp.workers.instruments import kernel_builder
from bexp.workers.instruments.kernel_builder import CACHE, KernelBuilder

GPU = torch.device("cuda:0")
EXPERTS = Experts(ExpertsShape(128, 64, 8, 2, torch.bfloat16), (256,), transposed=True)
OTHERS = replace(EXPERTS, num_tokens=(512,))
WORKS = "import sys; open({file!r}, 'a').write(sys.stdin.readline() + '\\n')"


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which the processes write the orders that they get."""
    file = tmp_path / "orders"
    file.touch()
    (tmp_path / "triton").mkdir()
    monkeypatch.setenv(CACHE, str(tmp_path / "triton"))
    monkeypatch.setattr(kernel_builder, "usable_cores", lambda: 16)
    monkeypatch.setattr(kernel_builder, "find_spec", lambda _: object())
    found = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    run_instead(WORKS.format(file=str(file)), monkeypatch)
    return file


def run_instead(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_builder, "module_command", lambda _: [sys.executable, "-c", script])


def build(*experts: Experts) -> None:
    builder = KernelBuilder(GPU)
    builder.start()
    builder.order(experts)
    builder.wait()


def test_kernels_are_built_once_for_the_same_experts(orders: Path) -> None:
    for experts in (EXPERTS, EXPERTS, OTHERS):
        build(experts)
    expected = Order((EXPERTS,), (9, 0), multiprocessors=132, processes=14)
    assert [Order.decode(line) for line in orders.read_text().splitlines()] == [
        expected,
        replace(expected, experts=(OTHERS,)),
    ]
    marks = list((orders.parent / "triton").iterdir())
    assert [stat.S_IMODE(mark.stat().st_mode) for mark in marks] == [0o600, 0o600]


def test_kernels_that_could_not_be_built_are_tried_again(orders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        run_instead("raise SystemExit(1)", patch)
        build(EXPERTS)
    build(EXPERTS)
    assert len(orders.read_text().splitlines()) == 1


def test_a_process_that_takes_too_long_is_ended(orders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead("import time; time.sleep(1000)", monkeypatch)
    monkeypatch.setattr(kernel_builder, "PATIENCE_SECONDS", 0.1)
    builder = KernelBuilder(GPU)
    builder.order([EXPERTS])
    process = builder._process
    assert process is not None
    builder.wait()
    assert process.returncode is not None
    assert not list((orders.parent / "triton").iterdir())


@pytest.mark.parametrize("lacks", ["a GPU", "cores", "experts"])
def test_nothing_is_started_where_nothing_can_be_won(orders: Path, monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    monkeypatch.setattr(kernel_builder, "usable_cores", lambda: 2 if lacks == "cores" else 16)
    builder = KernelBuilder(torch.device("cpu") if lacks == "a GPU" else GPU)
    builder.order([] if lacks == "experts" else [EXPERTS])
    builder.wait()
    assert builder._process is None
    assert not orders.read_text()
