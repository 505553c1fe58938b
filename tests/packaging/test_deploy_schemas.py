"""Compose, Kubernetes and KubeRay would take the files in deploy/, and would refuse them with a slip in them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.deployment_schemas import Document, InvalidDeploymentError, check_compose, check_kubernetes
from tests.packaging.deployments import DEPLOY, MANIFESTS, find_object, read_all, read_compose

Path_ = tuple[str | int, ...]
REMOVED = object()


def changed(document: Document, path: Path_, value: object) -> Document:
    """A copy with `value` at `path`, which may be new; REMOVED takes away what is there."""
    copy = deepcopy(document)
    place: Any = copy
    for step in path[:-1]:
        place = place[step]
    if value is REMOVED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return copy


def test_compose() -> None:
    check_compose(read_compose())


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_kubernetes(path: Path) -> None:
    documents = read_all(path)
    assert documents
    for document in documents:
        check_kubernetes(document)


HEAD = ("spec", "headGroupSpec")
GROUP = ("spec", "workerGroupSpecs", 0)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("apiVersion",), "ray.io/v2", "ray.io/v2"),
        (("spec", "rayVersion"), 2.6, "rayVersion"),
        ((*HEAD, "rayStartParams", "num-cpus"), 0, "num-cpus"),
        ((*GROUP, "replicas"), -1, "replicas"),
        ((*GROUP, "template", "spec", "containers", 0, "resource"), {}, "resource"),
        ((*HEAD, "template", "spec", "volumes", 0, "emptydir"), {}, "emptydir"),
    ],
)
def test_kuberay_refuses(path: Path_, value: object, complaint: str) -> None:
    with pytest.raises(InvalidDeploymentError, match=complaint):
        check_kubernetes(changed(find_object("RayCluster", "bexp"), path, value))
