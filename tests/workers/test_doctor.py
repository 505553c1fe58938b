import json
import os
import socket
import tempfile
from pathlib import Path

import pytest

from bexp.workers import doctor
from bexp.workers.devices.holder import Holder
from bexp.workers.devices.lock import DeviceBusyError
from bexp.workers.doctor import Diagnosis, diagnose
from bexp.workers.process.interface import ProfilerError


@pytest.fixture(autouse=True)
def a_host_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without GPUs, and with device locks that no other process here holds."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("bexp.measure.nvml._gpu_uuids", list)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_cpu_is_diagnosed_with_all_of_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnose(os.environ)
    cpu, cuda = found.devices
    assert cpu.device == "cpu"
    assert cuda.device == "cuda"
    assert not cuda.usable
    assert cuda.reason
    assert cpu.usable, cpu.reason
    assert cpu.report is not None
    assert {backend.name for backend in cpu.report.expert_backends} >= {"loop", "grouped_mm", "bmm"}

    monkeypatch.setattr(doctor, "diagnose", lambda environment: found)
    assert doctor.main(json_output=True) == 0
    assert Diagnosis.model_validate(json.loads(capsys.readouterr().out)) == found
    assert doctor.main(json_output=False) == 0
    printed = capsys.readouterr().out
    assert cpu.report.hardware.device_name in printed
    printed = " ".join(printed.split())
    assert "needs a CUDA device" in printed
    assert "CUDA graphs not usable: CUDA graphs need a GPU" in printed
    assert "experts block_sparse explored only if a request names it" in printed


def test_an_unusable_device_says_why(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise ProfilerError("the driver is too old")

    monkeypatch.setattr("bexp.workers.process.profiler.Profiler.start", fail)
    assert doctor.main(json_output=False) == 1
    assert "the driver is too old" in capsys.readouterr().out


def test_a_held_device_is_busy_and_names_who_has_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    since = "process 7 of user ann, started 2026-01-02 03:04:05"
    held = [f"{since}: python -P -m bexp.workers --device cpu", f"{since}: python train.py"]

    def fail(self: object) -> None:
        raise DeviceBusyError("cpu is in use", Holder(7, held[0]))

    monkeypatch.setattr("bexp.workers.process.profiler.Profiler.start", fail)
    assert doctor.main(json_output=False) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"cpu busy: held by worker {socket.gethostname()}-7, {since}: python -P" in printed
    del held[0]
    cpu = diagnose(os.environ).devices[0]
    assert (cpu.usable, cpu.busy, cpu.reason) == (False, True, f"held by {since}: python train.py")
