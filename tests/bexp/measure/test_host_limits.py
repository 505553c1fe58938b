import ctypes
import platform
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from bexp.measure import host_limits as host
from bexp.measure.heap import trim
from tests.waits import PATIENCE_SECONDS


def test_figures_of_this_host_are_plausible() -> None:
    assert host.usable_cores() >= 1
    assert 0 < host.available_bytes() <= host.total_bytes()
    assert host.processor_name()


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
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert run.stdout.strip() == "refused"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file system of its own for absolute paths."""
    monkeypatch.setattr(host, "Path", lambda path: tmp_path / path.lstrip("/"))
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host, "TOPOLOGY", tmp_path / "cpu")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_processor_is_named_by_the_kernel_or_by_python(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert host.processor_name() == "riscv64"
    monkeypatch.setattr(platform, "processor", lambda: "powerpc")
    assert host.processor_name() == "powerpc"
    write(root / "proc/cpuinfo", "processor\t: 0\nmodel name\t: Fast CPU: 3 GHz \nmodel name\t: another\n")
    assert host.processor_name() == "Fast CPU: 3 GHz"


def test_two_threads_of_a_core_are_one_core(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 4})
    for cpu, siblings in {0: "0,2", 2: "0,2", 1: "1,3", 3: "1,3"}.items():
        write(root / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list", siblings + "\n")
    assert host.usable_cores() == 3, "0 with 2, 1 with 3, and 4 whose siblings nobody tells"


def test_without_affinity_all_cpus_count(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert host.usable_cores() == 6
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert host.usable_cores() == 1


@pytest.mark.parametrize(("quota", "cores"), [(250_000, 2), (-1, 4), (20_000, 1)])
@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_is_a_cap(root: Path, monkeypatch: pytest.MonkeyPatch, quota: int, cores: int, version: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    if version == 1:
        write(root / "proc/self/cgroup", "5:cpuacct,cpu:/job\n3:memory:/other\n")
        write(root / "cgroup/cpu/job/cpu.cfs_quota_us", str(quota))
        write(root / "cgroup/cpu/job/cpu.cfs_period_us", "100000")
    else:
        write(root / "proc/self/cgroup", "0::/job\n")
        write(root / "cgroup/job/cpu.max", f"{'max' if quota < 0 else quota} 100000")
    assert host.usable_cores() == cores


def test_the_tightest_group_limits_the_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=900))
    assert (host.total_bytes(), host.available_bytes()) == (1000, 900)
    write(root / "proc/self/cgroup", "0::/a\n")
    write(root / "cgroup/a/memory.max", "800")
    write(root / "cgroup/a/memory.current", "300")
    assert (host.total_bytes(), host.available_bytes()) == (800, 500), "without statistics all of it is used"
    write(root / "cgroup/a/memory.stat", "anon 5\ninactive_file 100\n")
    assert host.available_bytes() == 600
    write(root / "cgroup/memory.max", "700")
    write(root / "cgroup/memory.current", "750")
    assert (host.total_bytes(), host.available_bytes()) == (700, 0)
    write(root / "cgroup/memory.stat", "inactive_file 900\n")
    assert host.available_bytes() == 600, "no group uses less than nothing"


def test_version_1_has_names_of_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=900))
    write(root / "proc/self/cgroup", "4:memory:/a\n")
    write(root / "cgroup/memory/a/memory.limit_in_bytes", "600")
    assert (host.total_bytes(), host.available_bytes()) == (1000, 900), "nobody tells its usage"
    write(root / "cgroup/memory/a/memory.usage_in_bytes", "500")
    write(root / "cgroup/memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 50\n")
    assert (host.total_bytes(), host.available_bytes()) == (600, 150)


@pytest.mark.parametrize(
    ("hard", "soft"), [(resource.RLIM_INFINITY, 3 * 1024 + 5000 + (64 << 20)), (4000, 4000)], ids=["free", "capped"]
)
def test_the_limit_is_the_data_and_its_growth(
    root: Path, monkeypatch: pytest.MonkeyPatch, hard: int, soft: int
) -> None:
    found: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: found.append((kind, limits)))
    host.limit_data(5000)
    assert found == [], "a platform that does not count data"
    write(root / "proc/self/status", "VmSize:\t 9 kB\nVmData:\t 3 kB\n")
    host.limit_data(5000)
    assert found == [(resource.RLIMIT_DATA, (soft, hard))]


def test_freed_memory_goes_back_where_the_library_can_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=trimmed.append))
    trim()
    assert trimmed == [0]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    trim()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=trimmed.append))
    trim()
    assert trimmed == [0]
