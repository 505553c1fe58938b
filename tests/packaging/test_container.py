"""The image and the deployments, read rather than built."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def test_known_instructions() -> None:
    known = {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {keyword for stage in STAGES for keyword, _ in stage} <= known


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


def read_all(path: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((ROOT / "deploy" / path).read_text()) if document]


def test_compose() -> None:
    (compose,) = read_all("compose.yaml")
    services = compose["services"]
    assert set(services) == {"postgres", "api", "worker", "worker-cpu"}
    password = "${BEXP_POSTGRES_PASSWORD:?"
    assert services["postgres"]["environment"]["POSTGRES_PASSWORD"].startswith(password)
    for name in ("api", "worker", "worker-cpu"):
        service = services[name]
        assert service["environment"]["BEXP_DATABASE_URL"].startswith("postgresql://bexp:" + password)
        assert (ROOT / "deploy" / service["build"]["context"] / "Dockerfile").exists()
    assert services["api"]["ports"] == [f"127.0.0.1:{DEFAULT_PORT}:{DEFAULT_PORT}"]
    assert services["worker"]["command"] == ["worker", "--device", "cuda:0"]
    (device,) = services["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert services["worker"]["healthcheck"] == {"disable": True}  # the image's asks the API


def get_container(document: dict[str, Any]) -> dict[str, Any]:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_kubernetes_api() -> None:
    deployment, service, _policy = read_all("kubernetes/api.yaml")
    container = get_container(deployment)
    assert container["args"] == ["serve", "--require-token"]
    assert container["ports"] == [{"name": "http", "containerPort": DEFAULT_PORT}]
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]


def test_kubernetes_worker() -> None:
    deployment, _policy = read_all("kubernetes/worker.yaml")
    container = get_container(deployment)
    assert container["args"] == ["worker", "--device", "cuda:0"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("path", ["kubernetes/api.yaml", "kubernetes/worker.yaml"])
def test_kubernetes_pods_are_confined(path: str) -> None:
    deployment = read_all(path)[0]
    pod = deployment["spec"]["template"]["spec"]
    (user,) = find(RUNTIME, "USER")
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == user
    container = get_container(deployment)
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    (variable,) = container["env"]
    assert variable["name"] == "BEXP_DATABASE_URL"
    assert "secretKeyRef" in variable["valueFrom"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
