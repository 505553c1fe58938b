"""The alert rules and the dashboard ask for what /metrics exports, in PromQL that parses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import sqlalchemy as sa
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bexp.api.settings import DEFAULT_PORT, ServiceSettings
from bexp.storage.database import Database
from bexp.storage.queue import Queue
from bexp.storage.tables import jobs
from bexp.storage.workers import register_worker
from tests.api.serving import in_process
from tests.contracts.samples import make_request, make_worker
from tests.packaging.deployments import DEPLOY

PROMETHEUS = DEPLOY / "prometheus"
OF_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus itself adds to what it scrapes."""

Exported = dict[str, dict[str, set[str]]]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def rules() -> list[dict[str, Any]]:
    return [rule for group in read(PROMETHEUS / "alerts.yaml")["groups"] for rule in group["rules"]]


DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in rules()} | {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}


@pytest.fixture
def exported(sqlite_database: Database, sqlite_url: str) -> Exported:
    """What /metrics exports: each sample's labels by its name, and their values."""
    register_worker(sqlite_database, make_worker("w", device_kind="cuda", targets={"bexp": "0.1.0"}))
    done, _ = Queue(sqlite_database).enqueue(make_request())
    with sqlite_database.begin() as connection:
        ended = {"state": "succeeded", "finished_at": sqlite_database.clock(timedelta(seconds=9))}
        connection.execute(sa.update(jobs).where(jobs.c.id == done.id).values(**ended))
    with in_process(ServiceSettings(sqlite_url)) as client:
        client.get("/healthz")
        text = client.get("/metrics").text
    found: Exported = {"up": {}}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def parts(expression: Any) -> Iterator[Any]:
    """Yield an expression and all that it is made of."""
    yield expression
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        if getattr(expression, name, None) is not None:
            yield from parts(getattr(expression, name))
    for argument in getattr(expression, "args", ()):
        yield from parts(argument)


def unknown_names(expression: str, exported: Exported) -> list[str]:
    """Return the metrics, labels and values of a PromQL expression that are not exported."""
    found: list[str] = []
    tree = list(parts(promql_parser.parse(expression)))
    selected = [part for part in tree if isinstance(part, promql_parser.VectorSelector)]
    known = set(OF_PROMETHEUS)
    for selector in selected:
        name = selector.name or ""
        labels = exported.get(name)
        if labels is None:
            found.append(name)
            continue
        known |= set(labels)
        for matcher in selector.matchers.matchers:
            values = labels.get(matcher.name)
            if values is None and matcher.name not in OF_PROMETHEUS:
                found.append(f"{name}.{matcher.name}")
            asked = (
                set(matcher.value.split("|")) if matcher.value.replace("|", "").replace("_", "").isalpha() else set()
            )
            if values is not None and not asked <= values:
                found.append(f"{name}.{matcher.name}={matcher.value}")
    assert selected, expression
    for part in tree:
        modifier = getattr(part, "modifier", None)
        if isinstance(part, promql_parser.AggregateExpr) and modifier is not None:
            found += [label for label in modifier.labels if label not in known]
    return found


def test_alerts_and_panels_ask_for_what_is_exported(exported: Exported) -> None:
    unknown = {name: unknown_names(expression, exported) for name, expression in EXPRESSIONS.items()}
    assert {name: names for name, names in unknown.items() if names} == {}


@pytest.mark.parametrize(
    ("expression", "unknown"),
    [
        ("sum(bexp_job)", "bexp_job"),
        ('bexp_jobs{stat="queued"}', "bexp_jobs.stat"),
        ('bexp_jobs{state=~"queued|waiting"}', "bexp_jobs.state=queued|waiting"),
        ("max by (kind) (delta(bexp_workers[5m])) > 1", "kind"),
    ],
)
def test_what_is_not_exported_is_noticed(exported: Exported, expression: str, unknown: str) -> None:
    assert unknown_names(expression, exported) == [unknown]


def test_each_alert_says_what_to_do_and_is_tried_by_promtool() -> None:
    tried = {
        sample["labels"]
        for test in read(PROMETHEUS / "alerts_test.yaml")["tests"]
        for check in test["promql_expr_test"]
        for sample in check["exp_samples"]
    }
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert f'{{alertname="{rule["alert"]}"}}' in tried


def test_prometheus_scrapes_the_api_with_those_rules() -> None:
    config = read(PROMETHEUS / "prometheus.yaml")
    assert [(PROMETHEUS / name).is_file() for name in config["rule_files"]] == [True]
    (scrape,) = config["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [f"127.0.0.1:{DEFAULT_PORT}"]}]
    down = next(rule for rule in rules() if rule["alert"] == "BexpDown")
    assert f'job="{scrape["job_name"]}"' in down["expr"]


def test_the_panels_of_the_dashboard_do_not_overlap_and_use_its_data_source() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart = [one[at] + one[size] <= other[at] or other[at] + other[size] <= one[at] for at, size in ("xw", "yh")]
        assert any(apart), (one, other)
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "job"}
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["description"]
        for owner in (panel, *panel["targets"]):
            assert owner["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
