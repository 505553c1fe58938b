"""What the files in deploy/ say agrees with what the code reads, and with each other."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from fastapi.testclient import TestClient

from bexp.api.app import create_app
from bexp.api.cli import app as command_line
from bexp.api.listener import SHUTDOWN_SECONDS
from bexp.api.local_worker import GRACE_SECONDS
from bexp.api.settings import DEFAULT_PORT, ServiceSettings, read_environment
from bexp.measure.device_names import parse_devices
from bexp.workers.settings import read_settings
from tests.packaging.deployment_schemas import Document
from tests.packaging.deployments import (
    DEPLOY,
    ROOT,
    Container,
    all_containers,
    bexp_containers,
    compose_containers,
    find_object,
    kubernetes_containers,
    pod_templates,
    read_compose,
    read_objects,
    seconds,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())

OTHERS_VARIABLES = {
    "postgres": {"POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD", "PGDATA"},
    "bexp": {"RAY_USAGE_STATS_ENABLED"},
}
"""What the images' other programs read, by image."""

by_owner = pytest.mark.parametrize("container", all_containers(), ids=lambda container: container.owner)
of_bexp = pytest.mark.parametrize("container", bexp_containers(), ids=lambda container: container.owner)
of_pods = pytest.mark.parametrize("container", list(kubernetes_containers()), ids=lambda container: container.owner)


def is_read(name: str) -> bool:
    """Whether the settings change with the variable, both of the command that is run and of the worker it becomes."""
    given = {name: "1234"}
    by_api = read_environment(given) != read_environment({})
    by_worker = read_settings(given).database_url != read_settings({}).database_url
    return by_api and (by_worker or name != "BEXP_DATABASE_URL")


def test_a_variable_that_nobody_reads_is_noticed() -> None:
    assert is_read("BEXP_DATABASE_URL")
    assert is_read("BEXP_PORT")
    assert not is_read("BEXP_DATABASE")


@by_owner
def test_variables_are_read(container: Container) -> None:
    others = OTHERS_VARIABLES[container.image.split(":")[0]]
    for name in container.variables:
        assert name in others if not name.startswith("BEXP_") else is_read(name), name


@of_bexp
def test_whoever_uses_the_database_is_told_where_it_is(container: Container) -> None:
    assert ("BEXP_DATABASE_URL" in container.variables) == (container.bexp_arguments() is not None)


@of_pods
def test_secrets_are_references(container: Container) -> None:
    for name, value in container.variables.items():
        if "PASSWORD" in name or name == "BEXP_DATABASE_URL":
            assert value["secretKeyRef"]["name"] == "bexp"
            key = value["secretKeyRef"]["key"]
            assert f"--from-literal={key}=" in (DEPLOY / "kubernetes/postgres/postgres.yaml").read_text()
        else:
            assert isinstance(value, str)


def parse(arguments: list[str]) -> dict[str, Any]:
    """The options of the command that `bexp ARGUMENTS` runs, or a click.UsageError."""
    group: Any = typer.main.get_command(command_line)
    with group.make_context("bexp", list(arguments)) as context:
        name, command, rest = group.resolve_command(context, arguments)
        with command.make_context(name, rest, parent=context) as inner:
            return dict(inner.params)


def test_what_runs() -> None:
    commands = {container.owner: container.bexp_arguments() for container in bexp_containers()}
    assert commands == {
        "api": ["serve", "--require-token"],
        "worker": ["worker", "--device", "cuda:0"],
        "worker-cpu": ["worker", "--device", "cpu"],
        "bexp-api/api": ["serve", "--require-token"],
        "bexp-worker/worker": ["worker", "--device", "cuda:0"],
        "bexp/ray-head": None,
        "bexp/ray-worker": None,
        "bexp-coordinator/coordinator": ["worker", "--ray", "bexp-head-svc:6379"],
    }


def count_gpus(container: Container) -> int:
    if container.pod:
        return int(container.body["resources"]["limits"].get("nvidia.com/gpu", 0))
    resources = container.body.get("deploy", {}).get("resources", {})
    return sum(len(device["device_ids"]) for device in resources.get("reservations", {}).get("devices", []))


@of_bexp
def test_a_worker_is_given_the_gpus_that_it_owns(container: Container) -> None:
    arguments = container.bexp_arguments()
    if arguments is None:
        assert count_gpus(container) == (1 if container.owner == "bexp/ray-worker" else 0)
        return
    device = parse(arguments).get("device") if "--device" in arguments else None
    owned = [name for name in parse_devices(device) if name != "cpu"] if device is not None else []
    assert len(owned) == count_gpus(container)


def tag(image: str) -> str:
    return image.partition(":")[2]


def test_images_agree() -> None:
    built = {container.image for container in compose_containers() if container.is_bexp}
    assert built == {"bexp"}
    for container in kubernetes_containers():
        if container.is_bexp:
            on_ray = container.owner.startswith(("bexp/", "bexp-coordinator/"))
            assert tag(container.image) == PROJECT["version"] + ("-ray" if on_ray else "")
    assert len({container.image for container in all_containers() if not container.is_bexp}) == 1


def test_the_image_can_be_built_with_extras() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert "ARG EXTRAS=transformers" in lines  # a config.json of Hugging Face would wait for ever without it
    (install,) = [line for line in lines if line.startswith("RUN /opt/bexp/bin/pip install")]
    assert lines.index("ARG EXTRAS=transformers") < lines.index(install)
    assert install.endswith('".[service${EXTRAS:+,${EXTRAS}}]"')
    assert (
        "--build-arg EXTRAS=transformers,ray --tag bexp:0.1.0-ray"
        in (DEPLOY / "kubernetes/ray/cluster.yaml").read_text()
    )


def test_the_version_of_ray_is_the_images() -> None:
    version = find_object("RayCluster", "bexp")["spec"]["rayVersion"]
    assert PINS.get("ray", version) == version


@pytest.fixture
def client(sqlite_url: str) -> Iterator[TestClient]:
    """The service as pods run it: beyond loopback, so that it asks for tokens."""
    app = create_app(ServiceSettings(sqlite_url, require_token=True))
    with TestClient(app, base_url="http://10.0.0.1", raise_server_exceptions=False) as client:
        yield client


def probes(container: Container) -> dict[str, Document]:
    return {name: probe for name, probe in container.body.items() if name.endswith("Probe")}


def test_the_api_answers_its_probes(client: TestClient) -> None:
    (container,) = [container for container in kubernetes_containers() if container.owner == "bexp-api/api"]
    asked = {name: probe["httpGet"] for name, probe in probes(container).items()}
    assert set(asked) == {"livenessProbe", "readinessProbe", "startupProbe"}
    for get in asked.values():
        assert container.ports()[get["port"]] == DEFAULT_PORT
        assert client.get(get["path"]).status_code == 200
    assert client.get("/v1/explorations").status_code == 401


def test_probes_of_the_api_wait_for_its_slowest_answer_and_for_long_upgrades() -> None:
    (container,) = [container for container in kubernetes_containers() if container.owner == "bexp-api/api"]
    asked = probes(container)
    for probe in asked.values():
        assert probe["timeoutSeconds"] > ServiceSettings("").answer_seconds
    start = asked["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 600  # an upgrade that is killed begins again


def test_an_api_is_replaced_while_it_serves_and_a_worker_frees_its_devices_first() -> None:
    deployments = {d["metadata"]["name"]: d["spec"]["strategy"] for d in read_objects() if d["kind"] == "Deployment"}
    assert deployments.pop("bexp-api") == {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    assert deployments == {name: {"type": "Recreate"} for name in ("bexp-worker", "bexp-coordinator")}


@of_pods
def test_probes_ask_ports_that_are_open(container: Container) -> None:
    told = [*container.ports().values()]
    if container.words:
        told += [int(port) for port in re.findall(r"--node-manager-port=(\d+)", " ".join(container.words))]
    for probe in probes(container).values():
        if "grpc" in probe:
            assert probe["grpc"]["port"] in told


def test_the_nodes_of_ray_listen_where_they_are_asked() -> None:
    spec = find_object("RayCluster", "bexp")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        assert group["rayStartParams"]["node-manager-port"] == ports["node-manager"]
        assert container["livenessProbe"]["grpc"]["port"] == int(ports["node-manager"])
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_the_coordinator_joins_the_cluster_by_its_head() -> None:
    cluster = find_object("RayCluster", "bexp")
    (head,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    port = next(port["containerPort"] for port in head["ports"] if port["name"] == "gcs-server")
    address = f"{cluster['metadata']['name']}-head-svc:{port}"  # the service that the operator makes
    (line,) = find_object("Deployment", "bexp-coordinator")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert re.match(rf"ray start --address={address} --num-cpus=0 --num-gpus=0 ", line)
    assert line.endswith(f"&& exec bexp worker --ray {address}")


def test_selectors_match_the_pods_that_are_meant() -> None:
    objects = read_objects()
    pods = {
        document["metadata"]["name"]: template["metadata"]["labels"]
        for document in objects
        for template in pod_templates(document)
    }
    for document in objects:
        name, spec = document["metadata"]["name"], document["spec"]
        if document["kind"] in ("Deployment", "StatefulSet"):
            selector = spec["selector"]["matchLabels"]
        elif document["kind"] == "Service":
            selector = spec["selector"]
            template = find_object("StatefulSet" if name == "bexp-postgres" else "Deployment", name)["spec"]["template"]
            (container,) = template["spec"]["containers"]
            named = {port["name"] for port in container["ports"]}
            assert {port["targetPort"] for port in spec["ports"]} <= named
        else:
            continue
        assert [pod for pod, labels in pods.items() if selector.items() <= labels.items()] == [name]


def test_the_database_of_the_manifests_is_where_the_secret_says() -> None:
    text = (DEPLOY / "kubernetes/postgres/postgres.yaml").read_text()
    match = re.search(r"database-url=postgresql://(\w+):\$password@([\w-]+):(\d+)/(\w+)", text)
    assert match is not None
    user, host, port, name = match.groups()
    service = find_object("Service", host)
    assert [entry["port"] for entry in service["spec"]["ports"]] == [int(port)]
    assert find_object("StatefulSet", host)["spec"]["serviceName"] == host
    (container,) = [container for container in kubernetes_containers() if container.owner == f"{host}/postgres"]
    assert (container.variables["POSTGRES_USER"], container.variables["POSTGRES_DB"]) == (user, name)
    for probe in probes(container).values():
        assert probe["exec"]["command"] == ["pg_isready", "--username", user, "--dbname", name]


def test_compose_has_what_its_services_need() -> None:
    compose = read_compose()
    services, volumes = compose["services"], compose["volumes"]
    for name, body in services.items():
        assert set(body.get("depends_on", {})) <= set(services)
        for volume in body.get("volumes", []):
            assert volume.split(":")[0] in volumes, name
        for needed, how in body.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                is_bexp = services[needed]["image"] == "bexp"  # whose image has a health check
                assert is_bexp or "test" in services[needed]["healthcheck"]
    url = services["api"]["environment"]["BEXP_DATABASE_URL"]
    told = services["postgres"]["environment"]
    assert told["POSTGRES_PASSWORD"].startswith("${BEXP_POSTGRES_PASSWORD:?"), "there is no default"
    assert services["api"]["ports"] == [f"127.0.0.1:{DEFAULT_PORT}:{DEFAULT_PORT}"]
    assert services["worker"]["healthcheck"] == {"disable": True}, "the image's asks the API"
    pattern = rf"postgresql://{told['POSTGRES_USER']}:\$\{{\w+[^}}]*\}}@postgres:5432/{told['POSTGRES_DB']}"
    assert re.fullmatch(pattern, url)


def test_the_workers_of_a_host_share_the_locks_of_its_devices() -> None:
    for container in compose_containers():
        if container.words[:1] == ("worker",):
            assert "tmp:/tmp" in container.body["volumes"]
            assert not any(mount.split(":")[0] == "/tmp" for mount in container.body["tmpfs"])


@of_bexp
def test_there_is_time_to_end(container: Container) -> None:
    """An API ends its streams; a worker puts its exploration back."""
    given = container.pod.get("terminationGracePeriodSeconds", 30)
    if not container.pod:
        given = seconds(container.body.get("stop_grace_period", "10s"))
    (delay,) = container.body.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])[1:]
    needed = SHUTDOWN_SECONDS if "serve" in (container.bexp_arguments() or ()) else 2 * GRACE_SECONDS
    assert given > int(delay) + needed


@of_bexp
def test_services_of_compose_are_confined(container: Container) -> None:
    if not container.pod:
        assert container.body["read_only"] is True
        assert container.body["cap_drop"] == ["ALL"]
        assert container.body["security_opt"] == ["no-new-privileges:true"]


@of_pods
def test_pods_are_confined(container: Container) -> None:
    body, pod = container.body, container.pod
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert body["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in body["resources"]["limits"]
    if container.is_bexp:
        (user,) = re.findall(r"^USER (\d+):\d+$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
        assert pod["securityContext"]["runAsUser"] == int(user)


@of_pods
def test_volumes_are_what_is_mounted(container: Container) -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in container.body["volumeMounts"]}
    claimed = {"data"} if container.owner == "bexp-postgres/postgres" else set()
    assert set(mounts) == {volume["name"] for volume in container.pod["volumes"]} | claimed
    assert len(set(mounts.values())) == len(mounts)
    assert "/tmp" in mounts.values()
    if count_gpus(container):  # libraries compile at home, kernels are kept apart, NCCL's ranks meet in shared memory
        assert {"/home/bexp", "/var/cache/bexp", "/dev/shm"} <= set(mounts.values())
        (shared,) = [volume for volume in container.pod["volumes"] if volume["name"] == "shm"]
        assert shared["emptyDir"]["medium"] == "Memory"


def test_the_folder_holds_what_is_applied_together() -> None:
    """`kubectl apply --filename FOLDER` reads no folders below: neither KubeRay's types nor a second database."""
    applied = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")}
    assert applied == {"api.yaml", "worker.yaml"}
