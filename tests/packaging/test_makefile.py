"""The two commands that set everything up, with an interpreter that only writes down what it is asked to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.waits import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]

FAKE_PYTHON = """#!/bin/sh
echo "$0 $*" >> "{log}"
case "$*" in
  *version_info*) exit {old} ;;
  *ensurepip*) exit {no_venv} ;;
  "-V") echo "Python 3.10.0" ;;
  "-m venv"*)
    for folder; do :; done
    mkdir -p "$folder/bin"
    cp "$0" "$folder/bin/python" ;;
  *"pip install"*) exit {no_install} ;;
esac
"""


class Checkout:
    """A folder with the Makefile and the files it depends on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.python = folder / "python"
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        self.behave()

    def behave(self, *, old: int = 0, no_venv: int = 0, no_install: int = 0) -> None:
        text = FAKE_PYTHON.format(log=self.log, old=old, no_venv=no_venv, no_install=no_install)
        self.python.write_text(text)
        self.python.chmod(0o755)

    def make(self, *arguments: str, python: str | None = None) -> subprocess.CompletedProcess[str]:
        clean = {
            key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "PYTHON", "OMP"))
        }
        command = ["make", "--no-print-directory", f"PYTHON={python or self.python}", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=clean, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )

    def count(self, part: str) -> int:
        return sum(part in line for line in self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_setting_up_happens_once(checkout: Checkout) -> None:
    assert checkout.make("setup").returncode == 0
    assert checkout.make("setup").returncode == 0
    assert (checkout.count("-m venv"), checkout.count("pip install")) == (1, 1)
    (install,) = [line for line in checkout.log.read_text().splitlines() if "pip install" in line]
    assert "--constraint constraints.txt" in install
    assert "--editable .[dev]" in install


def test_a_new_pin_is_installed_into_the_same_environment(checkout: Checkout) -> None:
    checkout.make("setup")
    stamp = (checkout.folder / ".venv" / ".installed").stat().st_mtime
    os.utime(checkout.folder / "constraints.txt", (stamp + 5, stamp + 5))
    assert checkout.make("setup").returncode == 0
    assert (checkout.count("-m venv"), checkout.count("pip install")) == (1, 2)


def test_a_missing_venv_package_is_named(checkout: Checkout) -> None:
    checkout.behave(no_venv=1)
    result = checkout.make("demo")
    assert result.returncode != 0
    assert "python3-venv is missing" in result.stderr
    assert "apt-get install python3-venv" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert checkout.count("-m venv") == 0


def test_another_python_is_named_and_none_at_all(checkout: Checkout) -> None:
    checkout.behave(old=1)
    result = checkout.make("test")
    assert result.returncode != 0
    assert "needs Python 3.11 or 3.12" in result.stderr
    assert "Python 3.10.0" in result.stderr
    none = checkout.make("demo", python="no-such-python")
    assert none.returncode != 0
    assert "needs Python 3.11 or 3.12" in none.stderr


def test_an_interrupted_installation_is_taken_up_again(checkout: Checkout) -> None:
    checkout.behave(no_install=1)
    assert checkout.make("setup").returncode != 0
    assert not (checkout.folder / ".venv" / ".installed").exists()
    checkout.behave()
    shutil.copy(checkout.python, checkout.folder / ".venv" / "bin" / "python")
    assert checkout.make("setup").returncode == 0
    assert (checkout.count("-m venv"), checkout.count("pip install")) == (1, 2)


def test_a_half_built_environment_is_built_anew(checkout: Checkout) -> None:
    broken = checkout.folder / ".venv" / "bin" / "python"
    broken.parent.mkdir(parents=True)
    broken.symlink_to("/no/such/python")
    broken.unlink()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert checkout.make("setup").returncode == 0
    assert checkout.count("-m venv --clear") == 1


def test_the_checks_are_all_there(checkout: Checkout) -> None:
    commands = checkout.make("--dry-run", "test").stdout
    for tool in ("ruff check", "ruff format --check", "mypy", "lint-imports", "pytest"):
        assert f".venv/bin/{tool}" in commands


def test_the_demo_replays_a_recording_and_says_so_and_then_explores_the_tiny_example(checkout: Checkout) -> None:
    text = checkout.make("--dry-run", "demo").stdout
    recorded, tiny = re.findall(r"bexp explore (\S+)", text)
    (recording,) = re.findall(r"replay:(\S+)", text)
    assert "tiny" in tiny
    assert all((ROOT / path).exists() for path in (recorded, tiny, recording))
    assert text.index("a recording") < text.index(recorded) < text.index("this machine") < text.index(tiny)


def test_threads_wait_without_spinning_unless_told_otherwise(checkout: Checkout) -> None:
    checkout.python.write_text(f'#!/bin/sh\necho "$OMP_WAIT_POLICY" >> {checkout.log}\nexit 1\n')
    checkout.make("demo")
    assert checkout.count("PASSIVE") > 0
    checkout.make("demo", "OMP_WAIT_POLICY=ACTIVE")
    assert checkout.count("ACTIVE") > 0


def test_the_first_target_is_the_demo(checkout: Checkout) -> None:
    assert checkout.make("--dry-run").stdout == checkout.make("--dry-run", "demo").stdout


def test_continuous_integration_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
