"""Whom the pods of deploy/kubernetes admit."""

from __future__ import annotations

from tests.packaging.deployment_schemas import Document
from tests.packaging.deployments import find_object, kubernetes_containers, pod_templates, read_objects


def test_only_the_cluster_of_ray_reaches_itself() -> None:
    policy = find_object("NetworkPolicy", "bexp-ray")["spec"]
    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    assert set(rule) == {"from"}
    assert set(peer) == {"podSelector"}
    assert peer["podSelector"] == policy["podSelector"]
    wanted = policy["podSelector"]["matchLabels"].items()
    inside = {
        f"{document['kind']}/{document['metadata']['name']}"
        for document in read_objects()
        for template in pod_templates(document)
        if wanted <= template["metadata"]["labels"].items()
    }
    assert inside == {"RayCluster/bexp", "Deployment/bexp-coordinator"}
    assert all(wanted <= t["metadata"]["labels"].items() for t in pod_templates(find_object("RayCluster", "bexp")))


def selects(selector: Document, labels: dict[str, str]) -> bool:
    """Whether a selector with labels and expressions of `In` matches a pod."""
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    return selector["matchLabels"].items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )


def pods_that(selector: Document) -> set[str]:
    """The names of the objects whose pods a selector matches."""
    return {
        document["metadata"]["name"]
        for document in read_objects()
        for template in pod_templates(document)
        if selects(selector, template["metadata"]["labels"])
    }


def test_each_pod_has_one_policy_that_says_whom_it_admits() -> None:
    policies = [document for document in read_objects() if document["kind"] == "NetworkPolicy"]
    assert all("Ingress" in policy["spec"]["policyTypes"] for policy in policies)
    selected = [name for policy in policies for name in sorted(pods_that(policy["spec"]["podSelector"]))]
    pods = [document["metadata"]["name"] for document in read_objects() if pod_templates(document)]
    assert sorted(selected) == sorted(pods)


def test_the_database_admits_those_who_are_told_where_it_is() -> None:
    spec = find_object("NetworkPolicy", "bexp-postgres")["spec"]
    (rule,) = spec["ingress"]
    (peer,) = rule["from"]
    told = {c.owner.split("/")[0] for c in kubernetes_containers() if "BEXP_DATABASE_URL" in c.variables}
    assert pods_that(peer["podSelector"]) == told
    (container,) = [container for container in kubernetes_containers() if container.owner == "bexp-postgres/postgres"]
    assert [port["port"] for port in rule["ports"]] == list(container.ports())
    assert "egress" not in spec
    assert "Egress" in spec["policyTypes"]


def test_clients_reach_the_api_and_nobody_a_worker() -> None:
    (rule,) = find_object("NetworkPolicy", "bexp-api")["spec"]["ingress"]
    (container,) = [container for container in kubernetes_containers() if container.owner == "bexp-api/api"]
    assert rule == {"ports": [{"protocol": "TCP", "port": name} for name in container.ports()]}
    assert "ingress" not in find_object("NetworkPolicy", "bexp-worker")["spec"]
