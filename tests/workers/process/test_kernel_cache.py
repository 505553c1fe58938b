"""The folders of compiled kernels that a profiler process is told."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from bexp.workers.process.kernel_cache import KEPT_SECONDS, LIBRARY_FOLDERS, kernel_cache, shrink_cache
from bexp.workers.process.profiler import Profiler


def folder_of(variables: dict[str, str]) -> Path:
    found = kernel_cache(variables)
    assert found.keys() == LIBRARY_FOLDERS.keys()
    (folder,) = {Path(path).parent for path in found.values()}
    return folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_folder_is_the_named_one_else_the_cache_of_the_user(tmp_path: Path) -> None:
    home, cache, named = (str(tmp_path / name) for name in ("home", "cache", "named"))
    assert folder_of({"HOME": home}) == Path(home) / ".cache" / "bexp" / "kernels"
    assert folder_of({"HOME": home, "XDG_CACHE_HOME": cache}) == Path(cache) / "bexp" / "kernels"
    assert folder_of({"HOME": home, "XDG_CACHE_HOME": cache, "BEXP_KERNEL_CACHE": named}) == Path(named)
    assert Path(named).stat().st_mode & 0o777 == 0o700


def test_without_a_folder_that_can_be_written_it_is_one_of_this_user_in_the_temporary_directory(
    tmp_path: Path, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    expected = temporary / f"bexp-kernels-{os.getuid()}"
    assert folder_of({"HOME": str(file), "BEXP_KERNEL_CACHE": str(file)}) == expected
    assert "BEXP_KERNEL_CACHE" in caplog.text
    assert folder_of({}) == expected
    expected.chmod(0o777)  # somebody else could put code there
    assert kernel_cache({}) == {}
    expected.rmdir()
    expected.symlink_to(tmp_path)
    assert kernel_cache({}) == {}


def test_a_profiler_process_gets_the_folders_unless_the_user_has_set_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, str]] = []

    class Process:
        def __init__(self, *_: object, environment: dict[str, str], **__: object) -> None:
            given.append(environment)

    monkeypatch.setattr("bexp.workers.process.profiler.DeviceProcess", Process)
    Profiler("cpu", environment={"BEXP_KERNEL_CACHE": str(tmp_path), "TRITON_CACHE_DIR": "/mine"})
    assert given[0]["TRITON_CACHE_DIR"] == "/mine"
    assert given[0]["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")


def test_the_oldest_kernels_go_first_and_none_that_is_young(tmp_path: Path) -> None:
    given = {"BEXP_KERNEL_CACHE": str(tmp_path / "named")}
    folders = {name: Path(path) for name, path in kernel_cache(given).items()}
    entries = []
    for days, folder in ((5, "TRITON_CACHE_DIR"), (4, "TORCHINDUCTOR_CACHE_DIR"), (3, "TRITON_CACHE_DIR")):
        entry = folders[folder] / f"kernel-{days}"
        entry.mkdir(parents=True)
        (entry / "code").write_bytes(bytes(1000))
        os.utime(entry / "code", (then := time.time() - days * KEPT_SECONDS, then))
        entries.append(entry)
    young = folders["TRITON_CACHE_DIR"] / "young"
    young.mkdir(parents=True)
    (young / "code").write_bytes(bytes(5000))
    assert shrink_cache(given, 8000) == 0
    assert shrink_cache(given, 7500) == 1
    assert [entry.exists() for entry in entries] == [False, True, True]
    elsewhere = given | {"TRITON_CACHE_DIR": str(folders["TRITON_CACHE_DIR"])}  # it is the user's own
    assert shrink_cache(elsewhere, 0) == 1
    assert [entry.exists() for entry in entries] == [False, False, True]
    assert shrink_cache(given, 0) == 1
    assert young.exists()
