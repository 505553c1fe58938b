"""The files in deploy/, taken apart into what runs: containers, what they are told, and whom they admit."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.packaging.deployment_schemas import RAY_API, Document, ray_pod_templates

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
REPOSITORY = "bexp"
"""The image's name without its tag."""


@dataclass(frozen=True)
class Container:
    """One container of a pod or service of Compose; `pod` is the pod's specification, empty in Compose."""

    owner: str
    image: str
    words: tuple[str, ...]
    variables: dict[str, Any]
    body: Document
    pod: Document

    @property
    def is_bexp(self) -> bool:
        """Whether it runs this project's image."""
        return self.image.split(":")[0] == REPOSITORY

    def bexp_arguments(self) -> list[str] | None:
        """What follows `bexp` where the container runs it; None where something else runs, as in the nodes of Ray."""
        if not self.is_bexp or not self.words:
            return None
        if "command" not in self.body or not self.pod:  # of Compose, `command` is what follows the entry point
            return list(self.words)
        for line in " ".join(self.words[2:]).split("&&"):  # bash -c LINE
            words = shlex.split(line)
            if words[:2] == ["exec", "bexp"]:
                return words[2:]
        return None

    def ports(self) -> dict[str, int]:
        """The pod's ports by name."""
        return {port["name"]: port["containerPort"] for port in self.body.get("ports", [])}


def read_all(path: Path) -> list[Document]:
    """The documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def read_compose() -> Document:
    """The Compose file."""
    (compose,) = read_all(DEPLOY / "compose.yaml")
    return compose


def read_objects() -> list[Document]:
    """Every object of every Kubernetes manifest."""
    return [document for path in MANIFESTS for document in read_all(path)]


def find_object(kind: str, name: str) -> Document:
    """One object of the manifests."""
    (found,) = [d for d in read_objects() if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


def pod_templates(document: Document) -> list[Document]:
    """The pods that an object makes."""
    if document["apiVersion"] == RAY_API:
        return ray_pod_templates(document)
    return [document["spec"]["template"]] if "template" in document["spec"] else []


def kubernetes_containers() -> Iterator[Container]:
    """Of all manifests; every pod has one."""
    for document in read_objects():
        for template in pod_templates(document):
            (body,) = template["spec"]["containers"]
            yield Container(
                owner=f"{document['metadata']['name']}/{body['name']}",
                image=body["image"],
                words=(*body.get("command", ()), *body.get("args", ())),
                variables={v["name"]: v.get("value", v.get("valueFrom")) for v in body.get("env", [])},
                body=body,
                pod=template["spec"],
            )


def compose_containers() -> Iterator[Container]:
    """Of the Compose file."""
    for name, body in read_compose()["services"].items():
        words = tuple(body.get("command", ()))
        yield Container(name, body["image"], words, body.get("environment", {}), body, {})


def all_containers() -> list[Container]:
    """Of the Compose file and the manifests."""
    return [*compose_containers(), *kubernetes_containers()]


def bexp_containers() -> list[Container]:
    """Those that run this project's image."""
    return [container for container in all_containers() if container.is_bexp]


def seconds(duration: str) -> int:
    """Of a duration in Compose's notation, such as 30s."""
    match = re.fullmatch(r"(\d+)s", duration)
    assert match is not None
    return int(match[1])
