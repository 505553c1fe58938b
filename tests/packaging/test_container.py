"""The image, read rather than built."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bexp.api.settings import DEFAULT_PORT, read_environment

ROOT = Path(__file__).parents[2]
Instruction = tuple[str, str]


def read_dockerfile() -> list[list[Instruction]]:
    """The instructions of each stage; those before the first FROM come first."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    stages: list[list[Instruction]] = [[]]
    for line in filter(None, map(str.strip, lines)):
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            stages.append([])
        stages[-1].append((keyword, rest.strip()))
    return stages


STAGES = read_dockerfile()
RUNTIME = STAGES[-1]


def find(stage: list[Instruction], keyword: str) -> list[str]:
    return [rest for word, rest in stage if word == keyword]


def read_variables() -> dict[str, str]:
    return dict(pair.split("=", 1) for text in find(RUNTIME, "ENV") for pair in text.split())


def test_a_slim_base_and_two_stages() -> None:
    bases = [find(stage, "FROM")[0] for stage in STAGES[1:]]
    assert len(bases) == 2
    assert all(re.fullmatch(r"python:\$\{PYTHON_VERSION\}-slim AS (build|runtime)", base) for base in bases)
    (default,) = find(STAGES[0], "ARG")
    assert default in ("PYTHON_VERSION=3.11", "PYTHON_VERSION=3.12")
    assert any("--from=build" in copy for copy in find(RUNTIME, "COPY"))


def test_pip_installs_with_pins() -> None:
    installs = [run for run in find(STAGES[1], "RUN") if "pip install" in run]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in run for run in installs)
    assert not [run for run in find(RUNTIME, "RUN") if "pip" in run]


def test_a_compiler_is_there_at_run_time_for_triton() -> None:
    assert any(re.search(r"install .*\bgcc\b", run) for run in find(RUNTIME, "RUN"))


def test_it_does_not_run_as_root() -> None:
    words = [keyword for keyword, _ in RUNTIME]
    (user,) = find(RUNTIME, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert "RUN" not in words[words.index("USER") :]


def test_one_image_serves_and_works() -> None:
    assert json.loads(find(RUNTIME, "ENTRYPOINT")[0]) == ["bexp"]
    assert json.loads(find(RUNTIME, "CMD")[0]) == ["serve", "--require-token"]


def test_the_port_is_one() -> None:
    settings = read_environment(read_variables())
    assert settings.port == DEFAULT_PORT
    assert settings.host == "0.0.0.0"
    assert find(RUNTIME, "EXPOSE") == [str(DEFAULT_PORT)]


def test_the_health_check_asks_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = find(RUNTIME, "HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert command[:2] == ["python", "-c"]
    asked: list[str] = []
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: asked.append(url))
    monkeypatch.setenv("BEXP_PORT", "1234")
    exec(command[2], {})
    assert asked == ["http://127.0.0.1:1234/healthz"]


def test_what_is_copied_exists_and_reaches_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        source
        for stage in STAGES
        for copy in find(stage, "COPY")
        if "--from" not in copy
        for source in copy.split()[:-1]
    }
    for source in copied:
        assert (ROOT / source).exists(), source
    assert copied == kept


def test_every_package_is_copied() -> None:
    copied = " ".join(find(STAGES[1], "COPY"))
    for package in ("bexp", "explorer", "storage", "workers", "api"):
        assert f"{package} ./{package}" in copied
