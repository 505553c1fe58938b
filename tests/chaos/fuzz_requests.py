"""Requests for the fuzz: a valid one of a route and a caller, in which at most one thing is changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import yaml

from bexp.api import examples
from bexp.explorer.formats.document import FormatError, load_document
from bexp.explorer.formats.request import parse_request
from tests.chaos.fuzz_changes import Changes, Request, Tenant
from tests.chaos.requests import put
from tests.chaos.schema_values import Schemas

ROOT = Path(__file__).parents[2]
JOBS = "/v1/explorations"
JOB = f"{JOBS}/{{exploration_id}}"
SUBMIT, REPORT, SET_QUOTA = f"POST {JOBS}", f"POST {JOB}/run-reports", "PUT /v1/owners/{owner}/quota"
NOTE = f"PUT {JOB}/notes"
CANCEL, RESUME, DELETE = f"POST {JOB}/cancel", f"POST {JOB}/resume", f"DELETE {JOB}"

WEIGHTS = {
    **{SUBMIT: 18, REPORT: 10, CANCEL: 9, RESUME: 5, DELETE: 9, SET_QUOTA: 2},
    **{f"GET {JOBS}": 6, f"GET {JOB}": 12, f"GET {JOB}/comparison": 2, "GET /v1/audit": 1, "GET /metrics": 1},
}
"""How often a route is called; the others: 3."""
CHANGED = 0.45
"""Share of the requests in which something is changed."""
MOST_OPEN = 150
"""Open explorations of an owner, above which it cancels instead of submitting."""


class Requests:
    """Draws requests to the routes of an OpenAPI document."""

    def __init__(self, document: Mapping[str, Any], tenants: Sequence[Tenant], admin: Tenant, rng: Random) -> None:
        self._rng = rng
        self._tenants = tenants
        self._admin = admin
        self._schemas = Schemas(document, rng)
        self._routes = {
            f"{method.upper()} {path}": operation
            for path, item in document["paths"].items()
            for method, operation in item.items()
        }
        self._bases = read_bases()
        self._changes = Changes(self._routes, tenants, admin, rng)

    def draw(self) -> Request:
        """Return the next request."""
        rng = self._rng
        weights = [WEIGHTS.get(name, 3) for name in self._routes]
        request = self._valid(rng.choices(list(self._routes), weights)[0])
        if rng.random() < CHANGED and not request.change:
            self._changes.apply(request)
        return request

    def _valid(self, route: str) -> Request:
        rng = self._rng
        of_admin = "/audit" in route or "quota" in route
        tenant = self._admin if of_admin else rng.choices(self._tenants, (8, 8, 3, 1))[0]
        if route == SUBMIT and len(tenant.open) > MOST_OPEN:
            route = CANCEL
        method, path = route.split(" ")
        request = Request(route, method, path, None if of_admin else tenant)
        request.headers["Authorization"] = f"Bearer {tenant.tokens['usual']}"
        request.headers["Accept"] = "*/*"
        if "{exploration_id}" in path:
            request.job_id = self._job_of(tenant, route)
            request.path = path.replace("{exploration_id}", request.job_id)
        request.path = request.path.replace("{owner}", f"spare-{rng.randrange(9)}")
        for parameter in self._routes[route].get("parameters", ()):
            if parameter["in"] == "query" and (parameter["required"] or rng.random() < 0.1):
                request.query.append((parameter["name"], self._parameter(parameter, tenant)))
        if route == SUBMIT:
            self._submit(request, tenant)
        elif route == REPORT:
            steps = rng.randrange(1, 1 << 40)
            request.send_json({**examples.RUN_REPORT["report"], "steps": steps, "hardware": tenant.name})
        elif route == NOTE:
            request.send_json({"text": rng.choice(("", "tried twice", "\u00e9 <b>\n"))})
        elif route == SET_QUOTA:
            request.send_json(self._schemas.draw({"$ref": "#/components/schemas/QuotaLimits"}))
        request.is_chunked = rng.random() < 0.1
        return request

    def _job_of(self, tenant: Tenant, route: str) -> str:
        choices = {CANCEL: tenant.open, RESUME: tenant.ended, DELETE: tenant.ended}
        ids = choices.get(route, tenant.answered)
        if route in {f"GET {JOB}", f"GET {JOB}/events", f"GET {JOB}/log"} or not ids:
            ids = [*tenant.open, *tenant.answered, *tenant.ended]
        return self._rng.choice(ids) if ids else "0123456789abcdef"

    def _parameter(self, parameter: Mapping[str, Any], tenant: Tenant) -> str:
        known: dict[str, Callable[[], Any]] = {
            "other": lambda: self._job_of(tenant, "GET"),
            "label": lambda: f"owner={tenant.name}",
            "set": lambda: f"batch_size={self._rng.choice((8, 64, 512))}",
            "format": lambda: self._rng.choice(("json", "deepspeed", "transformers", "megatron", "torchtitan")),
            "follow": lambda: "false",
        }
        value = known.get(parameter["name"], lambda: self._schemas.draw(parameter["schema"]))()
        return value if isinstance(value, str) else json.dumps(value)

    def _submit(self, request: Request, tenant: Tenant) -> None:
        rng = self._rng
        document = json.loads(rng.choice(self._bases))
        document["labels"] = {"owner": tenant.name}
        if rng.random() < 0.5:
            document["seed"] = rng.randrange(5)
        if rng.random() < 0.2:
            put(document, *self._schemas.draw_field("ExplorationRequest"))
            request.change = "schema_value"
        if rng.random() < 0.1:
            request.headers["Idempotency-Key"] = f"key-{rng.randrange(50)}"
        if rng.random() < 0.2:
            request.headers["Content-Type"] = "application/yaml"
            request.body = str(yaml.dump(document, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))).encode()
        else:
            request.send_json(document)


def read_bases() -> list[str]:
    """Return valid requests as JSON: the examples, and published configurations of Hugging Face."""
    documents = [load_document(path.read_text()) for path in sorted(ROOT.glob("examples/*.yaml"))]
    configurations = [json.loads(path.read_text()) for path in sorted(ROOT.glob("benchmarks/published/*.json"))]
    documents += [{"hf_config": each, "hf_seq_length": 1024, "batch_size": 64} for each in configurations]
    found = []
    for document in documents:
        try:
            parse_request({**document, "labels": {"owner": "x"}, "seed": 1})
        except FormatError:  # a Cerebras Model Zoo configuration has no labels
            continue
        found.append(json.dumps(document))
    return found
