import subprocess
import sys
from pathlib import Path

import pytest

from bexp.measure import host_limits as host


def test_figures_of_this_host_are_plausible() -> None:
    assert host.usable_cores() >= 1
    assert 0 < host.available_bytes() <= host.total_bytes()
    assert host.processor_name()


def test_memory_limit_of_the_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "job"
    group.mkdir()
    (tmp_path / "memory.max").write_text("max\n")
    (group / "memory.max").write_text(f"{1 << 30}\n")
    (group / "memory.current").write_text(f"{700 << 20}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {200 << 20}\n")
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_group_folders", lambda controller: [group, tmp_path])
    assert host.total_bytes() == 1 << 30
    assert host.available_bytes() == (1 << 30) - (500 << 20)


@pytest.mark.parametrize(("text", "cores"), [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1)])
def test_cpu_quota_caps_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(host, "_group_folders", lambda controller: [tmp_path])
    monkeypatch.setattr(host, "_siblings", str)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert host.usable_cores() == cores


def test_data_limit_stops_growth_and_nothing_else() -> None:
    script = """
from bexp.measure import host_limits as host
host.limit_data(64 << 20)
small = bytearray(64 << 20)
try:
    large = bytearray(512 << 20)
except MemoryError:
    print("refused")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "refused"
