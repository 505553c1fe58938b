"""What the sanitizer's exit status means; a script stands in for the tool, so no GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import sanitizer


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tool on PATH that prints a finding, and exits as it is told."""
    script = tmp_path / "compute-sanitizer"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sanitizer, "run_here", lambda cases: 0)
    return script


@pytest.mark.parametrize(
    ("commands", "status", "printed"),
    [
        ("exit 0", 0, "memcheck: clean"),
        ("echo case router; echo '===== Invalid read'; exit 9", 1, "case router\n===== Invalid read"),
        ("echo no device; exit 3", 1, "memcheck: failed"),
        ("exec sleep 5", 1, "memcheck: timed_out"),
    ],
    ids=["clean", "errors", "did not run", "too long"],
)
def test_the_command_says_what_a_tool_found(
    commands: str, status: int, printed: str, tool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.write_text(f"#!/bin/bash\n{commands}\n")
    tool.chmod(0o755)
    seconds = "0.1" if "sleep" in commands else "30"
    assert sanitizer.main(["--tools", "memcheck", "--cases", "router", "--seconds", seconds]) == status
    assert printed in capsys.readouterr().out


def test_the_command_says_that_there_is_no_tool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: None)
    assert sanitizer.main([]) == 2
    assert "no compute-sanitizer" in capsys.readouterr().out
