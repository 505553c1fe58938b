from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bexp.kernels.experts.auto import plans
from bexp.kernels.experts.auto.choice import ByLoad
from bexp.kernels.experts.auto.products import STOCK
from bexp.kernels.experts.auto.table import KernelTable, folder, row_class, rows_of_class
from bexp.workers.process.kernel_cache import kernel_cache
from tests.bexp.kernels.auto_tables import CPU, FASTER, OTHER

pytestmark = pytest.mark.usefixtures("tables")


def test_a_class_is_measured_at_a_number_of_rows_within_it() -> None:
    assert [row_class(rows_of_class(number)) for number in range(2, 40)] == list(range(2, 40))
    assert [rows_of_class(row_class(1 << power)) for power in range(1, 20)] == [1 << power for power in range(1, 20)]
    assert row_class(0) == row_class(1) == 0


def test_a_shape_without_a_class_in_the_file_is_served_by_the_stock_back_end() -> None:
    table = plans.table_of(CPU)
    table.path.write_text(of_this_machine("{}").replace("OF", json.dumps(dict(table.of))))
    read = KernelTable.of_device(CPU)
    assert {plan for _, plan in read.steps("shape", STOCK)} == {read.plan("shape", 32, STOCK)} == {STOCK}


def test_a_table_is_read_by_a_later_process_with_the_same_versions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    plans.table_of(CPU).write("shape", 10, FASTER)
    assert KernelTable.of_device(CPU).plan("shape", 32, STOCK) == OTHER
    path = KernelTable.of_device(CPU).path
    monkeypatch.setattr("bexp.kernels.experts.auto.table._version", lambda package: "another")
    other = KernelTable.of_device(CPU)
    assert other.path != path
    assert other.plan("shape", 32, STOCK) == STOCK
    other.path = path  # a file that was renamed, or whose name is the hash of two machines
    other.read()
    assert other.plan("shape", 32, STOCK) == STOCK


BROKEN_TIMES = ("[0.0, 0.0, 1.0, 0.0]", "[1.0, 0.0, NaN, 0.0]", "[1.0, 0.0]")


def of_this_machine(classes: str) -> str:
    return f'{{"of": OF, "seconds": {{"shape": {classes}}}}}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"of": {}}', '{"of": OF}', '{"of": OF, "seconds": []}', of_this_machine('{"x": {}}')),
        *(of_this_machine('{"10": []}'), of_this_machine('{"1000000000": {}}')),
        *(of_this_machine(f'{{"10": {{"uniform": {{"other": {value}}}}}}}') for value in BROKEN_TIMES),
    ],
)
def test_a_broken_file_is_no_table_and_is_replaced(text: str, caplog: pytest.LogCaptureFixture) -> None:
    table = plans.table_of(CPU)
    table.path.write_text(text.replace("OF", json.dumps(dict(table.of))))
    assert KernelTable.of_device(CPU).plan("shape", 32, STOCK) == STOCK
    assert ("is not read" in caplog.text) is (text != '{"of": {}}')
    table.write("shape", 10, FASTER)
    assert KernelTable.of_device(CPU).plan("shape", 32, STOCK) == OTHER


def test_a_folder_that_cannot_be_written_costs_only_the_file(tables: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tables / "file").write_text("")
    table = KernelTable(tables / "file" / "table.json", {})
    table.write("shape", 10, FASTER)
    assert table.plan("shape", 32, STOCK) == OTHER
    assert "is not written" in caplog.text


@pytest.mark.parametrize("cache", ["cache", "file", None], ids=["usual", "cannot be written", "without a home"])
def test_a_trainer_reads_tables_where_a_worker_keeps_them(
    cache: str | None, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tables / "file").write_text("")
    monkeypatch.delenv("BEXP_EXPERT_TABLES")
    monkeypatch.delenv("BEXP_KERNEL_CACHE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "" if cache is None else str(tables / cache))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tables))
    kept = Path(kernel_cache(os.environ)["BEXP_EXPERT_TABLES"])
    kept.mkdir()
    assert folder() == kept


def test_processes_that_write_at_once_lose_nothing(tables: Path) -> None:
    path, context = tables / "table.json", multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_classes, args=(path, range(first, 40, 2))) for first in (0, 1)]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            reads += bool(json.loads(path.read_text())["seconds"])  # whole at any time
    for writer in writers:
        writer.join()
    assert reads
    assert sorted(map(int, json.loads(path.read_text())["seconds"]["shape"])) == list(range(40))
    assert {each.name for each in tables.iterdir()} == {"table.json", "table.lock"}


def _write_classes(path: Path, numbers: range) -> None:
    for number in numbers:
        KernelTable(path, {}).write("shape", number, FASTER)


@pytest.mark.parametrize(("allowed", "measured"), [(False, 0), (True, 1)], ids=["reads only", "may measure"])
def test_a_class_is_measured_once_where_that_is_allowed(
    allowed: bool, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def measure(num_rows: int) -> ByLoad:
        calls.append(num_rows)
        return FASTER

    if allowed:
        monkeypatch.setenv("BEXP_MEASURE_EXPERTS", "1")
    for _ in range(2):
        found = plans.settle("shape", 100, CPU, measure, may=plans.may_measure(CPU))
    assert found == (OTHER if allowed else STOCK)
    assert calls == [rows_of_class(row_class(100))] * measured


def test_nothing_is_measured_during_a_capture_or_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEXP_MEASURE_EXPERTS", "1")
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert plans.may_measure(cuda)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not plans.may_measure(cuda)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not plans.may_measure(CPU)


def test_nothing_is_measured_within_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEXP_MEASURE_EXPERTS", "1")
    found: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: found.append(plans.may_measure(CPU)))
    x.sum().backward()
    assert found == [False]
    assert plans.may_measure(CPU)


def test_a_measurement_that_fails_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    def measure(_: int) -> ByLoad:
        raise torch.OutOfMemoryError("out of memory")

    assert plans.settle("shape", 100, CPU, measure, may=True) == STOCK
    assert "out of memory" in caplog.text
    assert plans.settle("shape", 100, CPU, lambda _: FASTER, may=True) == OTHER


def test_a_device_has_one_table_by_whatever_name_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(plans, "KernelTable", SimpleNamespace(of_device=lambda device: [device]))
    tables: list[object] = [plans.table_of(torch.device(name)) for name in ("cuda:1", "cuda", "cuda:0")]
    assert tables[0] is tables[1]
    assert tables[2] == [torch.device("cuda", 0)]
