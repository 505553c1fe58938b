"""Schemas of the files in deploy/, all of them on this machine: nothing is fetched.

Compose files are held against the Compose specification's own schema, which check-jsonschema carries, and Kubernetes'
objects against those of its API, which kubernetes-validate carries. KubeRay's schema comes in no package: the fields
that matter here are written down below, after its API reference (ray.io/v1); the pods inside are Kubernetes' own.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it has no types
import kubernetes_validate  # type: ignore[import-untyped]  # it has no types

Document = dict[str, Any]

OLDEST_KUBERNETES, NEWEST_KUBERNETES = "1.29", "1.37"
RAY_API = "ray.io/v1"

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}
POD_TEMPLATE = {"type": "object"}
RAY_START_PARAMS = {
    **TEXTS,
    "propertyNames": {
        "enum": [
            "address",
            "block",
            "dashboard-agent-listen-port",
            "dashboard-host",
            "dashboard-port",
            "disable-usage-stats",
            "include-dashboard",
            "max-worker-port",
            "metrics-export-port",
            "min-worker-port",
            "node-manager-port",
            "num-cpus",
            "num-gpus",
            "object-manager-port",
            "object-store-memory",
            "port",
            "ray-client-server-port",
            "resources",
            "temp-dir",
            "worker-port-list",
        ]
    },
}
"""Of both groups: all are strings, which become options of `ray start`."""


def _closed(required: list[str], **properties: object) -> Document:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


RAY_CLUSTER = _closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": RAY_API},
    kind={"const": "RayCluster"},
    metadata=_closed(
        ["name"],
        name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 50},
        namespace={"type": "string"},
        labels=TEXTS,
        annotations=TEXTS,
    ),
    spec=_closed(
        ["headGroupSpec"],
        rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        suspend={"type": "boolean"},
        enableInTreeAutoscaling={"type": "boolean"},
        headServiceAnnotations=TEXTS,
        headGroupSpec=_closed(
            ["rayStartParams", "template"],
            serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
            enableIngress={"type": "boolean"},
            resources=TEXTS,
            labels=TEXTS,
            rayStartParams=RAY_START_PARAMS,
            template=POD_TEMPLATE,
        ),
        workerGroupSpecs={
            "type": "array",
            "items": _closed(
                ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
                groupName={"type": "string", "minLength": 1},
                replicas=COUNT,
                minReplicas=COUNT,
                maxReplicas=COUNT,
                idleTimeoutSeconds=COUNT,
                numOfHosts={"type": "integer", "minimum": 1},
                suspend={"type": "boolean"},
                resources=TEXTS,
                labels=TEXTS,
                rayStartParams=RAY_START_PARAMS,
                template=POD_TEMPLATE,
            ),
        },
    ),
)


class InvalidDeploymentError(Exception):
    """A file in deploy/ is not what Compose, Kubernetes or KubeRay reads."""


def check_compose(document: Document) -> None:
    """Raise InvalidDeploymentError unless the Compose specification allows it."""
    _check(document, _compose_schema())


def check_kubernetes(document: Document) -> None:
    """Raise InvalidDeploymentError unless both an old and a new Kubernetes, or KubeRay, would take the object."""
    if document.get("apiVersion") == RAY_API:
        _check(document, RAY_CLUSTER)
        for template in ray_pod_templates(document):
            name = document["metadata"]["name"]
            check_kubernetes(
                {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
            )
        return
    for version in (OLDEST_KUBERNETES, NEWEST_KUBERNETES):
        try:
            used = kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise InvalidDeploymentError(f"{_path(error)}: {error.message}") from error
        except kubernetes_validate.SchemaNotFoundError as error:
            raise InvalidDeploymentError(error.message) from error
        assert used == version


def ray_pod_templates(document: Document) -> list[Document]:
    """Of the head and of each group of workers."""
    spec = document["spec"]
    return [group["template"] for group in (spec["headGroupSpec"], *spec.get("workerGroupSpecs", []))]


@cache
def _compose_schema() -> Document:
    path = files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json")
    schema: Document = json.loads(path.read_text(encoding="utf-8"))
    return schema


def _check(document: Document, schema: Document) -> None:
    try:
        jsonschema.Draft202012Validator(schema).validate(document)
    except jsonschema.ValidationError as error:
        raise InvalidDeploymentError(f"{_path(error)}: {error.message}") from error


def _path(error: Any) -> str:
    return ".".join(map(str, error.absolute_path))
