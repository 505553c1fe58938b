from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bexp.api.examples import REQUEST, REQUEST_YAML
from tests.api.problems import assert_problem

EXPLORATIONS = "/v1/explorations"
JSON_HEADERS = {"Content-Type": "application/json"}
YAML_HEADERS = {"Content-Type": "application/yaml"}
GPT2 = {
    "target": "bexp",
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "n_positions": 128,
    "vocab_size": 512,
}


def change(path: str, value: Any) -> dict[str, Any]:
    """The example with one field changed, or taken out with `...`."""
    document = copy.deepcopy(REQUEST)
    *parents, last = path.split(".")
    owner = document
    for parent in parents:
        owner = owner.setdefault(parent, {})
    if value is ...:
        del owner[last]
    else:
        owner[last] = value
    return document


def test_a_submission_is_queued_and_can_be_found(client: TestClient) -> None:
    response = client.post(EXPLORATIONS, json=REQUEST)
    assert response.status_code == 202
    exploration = response.json()
    assert exploration["state"] == "queued"
    assert response.headers["Location"] == exploration["links"]["self"] == f"{EXPLORATIONS}/{exploration['id']}"
    assert client.get(response.headers["Location"]).json() == exploration


@pytest.mark.parametrize("media_type", ["application/yaml", "text/yaml; charset=utf-8", "application/x-yaml"])
def test_yaml_means_what_json_means(client: TestClient, media_type: str) -> None:
    response = client.post(EXPLORATIONS, content=REQUEST_YAML, headers={"Content-Type": media_type})
    assert response.status_code == 202, response.text
    assert response.json()["request"] == client.post(EXPLORATIONS, json=REQUEST).json()["request"]


def test_what_was_ignored_is_said_in_the_response_and_in_the_log(client: TestClient) -> None:
    exploration = client.post(EXPLORATIONS, json=GPT2 | {"use_mrope": False, "other": None}).json()
    (notice,) = exploration["request"]["notices"]
    assert notice == "ignored, because they change nothing: use_mrope, other"
    events = client.get(exploration["links"]["events"], headers={"Accept": "application/json"}).json()["items"]
    assert [(event["seq"], event["code"]) for event in events] == [(1, 101), (2, 302)]
    assert notice in events[1]["message"]
    assert exploration["last_seq"] == 2


def test_fields_that_are_set_replace_those_of_the_body(client: TestClient) -> None:
    fields = ["batch_size=256", "model.seq_length=64", "recompute=[none]"]
    asked = client.post(EXPLORATIONS, params={"set": fields}, json=GPT2 | {"batch_size": 8}).json()["request"]
    assert (asked["batch_size"], asked["model"]["seq_length"], asked["recompute"]) == (256, 64, ["none"])


@pytest.mark.parametrize(
    ("assignment", "field"),
    [
        ("batch_size", "set"),
        ("batch_size= ", "set"),
        ("=2", "set"),
        ("batch_size=-1", "batch_size"),
        ("batch_size=[", "batch_size"),
    ],
)
def test_a_field_that_cannot_be_set_is_named(client: TestClient, assignment: str, field: str) -> None:
    response = client.post(EXPLORATIONS, params={"set": assignment}, json=REQUEST)
    assert_problem(response, 422)
    assert [error.get("field") for error in response.json()["errors"]] == [field]


@pytest.mark.parametrize("key", ["", " ", "x" * 256, b"\xff"])
def test_an_odd_idempotency_key_is_refused(client: TestClient, key: str | bytes) -> None:
    value = key.encode() if isinstance(key, str) else key
    response = client.post(EXPLORATIONS, json=REQUEST, headers=[(b"Idempotency-Key", value)])
    assert_problem(response, 422)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (change("model.num_attention_heads", 3), "model.hidden_size"),
        (change("model.num_query_groups", [4, 3]), "num_query_groups"),
        (change("micro_batch_size", {"explore": {"min": 8, "max": 2}}), "micro_batch_size.explore.min"),
        (change("model.moe.num_experts", 10**400), "model.moe.num_experts"),
        (change("model.num_layers", "many"), "model.num_layers"),
        (change("model.num_layers", True), "model.num_layers"),
        (change("model.seq_length", ...), "model.seq_length"),
        (change("model", ...), "model"),
        (change("recompute", ["sometimes"]), "recompute.0"),
        (change("parallelism.context_parallel_size", 4), "parallelism.context_parallel_size"),
        (change("context_parallel", {"sizes": [2]}), "context_parallel.sizes"),
        (change("context_parallel", {"sizes": "two"}), "context_parallel.sizes"),
        (change("context_parallel", {"sizes": [1, "x"]}), "context_parallel.sizes"),
        (change("context_parallel", {"layouts": ["spiral"]}), "context_parallel.layouts.0"),
        (change("colour", "red"), "colour"),
        (change("model.name", "x\ny"), "model.name"),
        (change("model.name", "\0"), "model.name"),
        (change("model.name", "\ud800"), "model.name"),
        (GPT2 | {"model_type": "vit"}, "model_type"),
        (GPT2 | {"target": "transformers", "n_positions": 64, "seq_length": 65}, "seq_length"),
        (GPT2 | {"target": "transformers", "trust_remote_code": True}, "trust_remote_code"),
        (GPT2 | {"target": "Other"}, "target"),
        ({"target": "train.py:Target"}, "target"),
        ({"target": "/home/me/train.py"}, "target"),
        ({"target": "local"}, "target"),
        ({"target": "local.train"}, "target"),
        (change("target_config", {"width": 64}), "target_config"),
        (change("training", {"lora": {"r": 8, "target_modules": ["q_proj"]}}), "training.lora"),
    ],
)
def test_bad_input_names_the_field_and_the_rule(client: TestClient, document: dict[str, Any], field: str) -> None:
    response = client.post(EXPLORATIONS, content=json.dumps(document), headers=JSON_HEADERS)
    assert_problem(response, 422)
    errors = response.json()["errors"]
    named = [error for error in errors if error.get("field") == field]
    assert named, errors
    assert all(error["message"] for error in errors)
    assert named[0]["pointer"] == "#/" + field.replace(".", "/")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff\xfe{",
        b'{"model": {"name": "\\ud800"}}',
        b"[" * 100_000,
        b'{"batch_size": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_mapping_of_plain_data_is_refused(client: TestClient, body: bytes) -> None:
    for headers in (JSON_HEADERS, YAML_HEADERS):
        assert_problem(client.post(EXPLORATIONS, content=body, headers=headers), 422)


HUGE = "0x" + "f" * 5000  # Python takes this, but prints no integer of more than 4300 digits


@pytest.mark.parametrize(
    "text",
    [
        "model: !!python/object/apply:os.system [id]\n",
        "\t",
        f"model: {{num_heads: 1, nonlinearity: {HUGE}}}",
        f"model: {{num_heads: 1, {HUGE}: 1}}",
        f"model: {{num_heads: 1, moe: {{num_experts: 8, top_k: {HUGE}}}}}",
        REQUEST_YAML.replace("top_k: 2", f"top_k: {HUGE}"),
    ],
)
def test_yaml_bombs_and_oddities_are_refused(client: TestClient, text: str) -> None:
    response = client.post(EXPLORATIONS, content=text, headers=YAML_HEADERS)
    assert_problem(response, 422)
    assert "set_int_max_str_digits" not in response.text


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        ({"hunter2": 3}, "entry 1 must be a whole number from 1 on"),
        ("hunter2", "lognormal(mean, sigma)"),
        ({"password": "hunter2"}, "entry 1 must be"),
    ],
)
def test_lengths_that_are_none_are_refused_with_a_sentence(client: TestClient, lengths: object, sentence: str) -> None:
    document = {"hf_config": {"model_type": "llama"}, "hf_seq_length": 64, "lengths": lengths}
    response = client.post(EXPLORATIONS, json=document)
    assert_problem(response, 422)
    assert sentence in response.text
    assert "hunter2" not in response.text


def test_secrets_in_a_wrong_place_are_not_sent_back(client: TestClient) -> None:
    document = change("seed", "hunter2") | {"micro_batch_size": {"password": "hunter2"}}
    response = client.post(EXPLORATIONS, json=document)
    assert_problem(response, 422)
    assert "hunter2" not in response.text


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": ""},
        {"Content-Type": "application/json; charset*=utf-8''x"},
        {"Content-Type": "\xff;;="},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_other_media_types_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    response = client.post(EXPLORATIONS, content=json.dumps(REQUEST), headers=raw)
    assert_problem(response, 415)
    assert "application/yaml" in response.headers["Accept-Post"]


ODD: list[Any] = [float("nan"), float("inf"), -1, 0, 10**30, "", "\ud800", "\0", [], {}, None, True, "auto"]
VALUES = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [*REQUEST, *(f"model.{key}" for key in REQUEST["model"]), *(f"model.moe.{key}" for key in ("top_k", "x"))]
FIELDS += ["bta", "bta.max_tile", "routing", "routing.shares", "training.loss", "parallelism", "budget.max_trials"]
FIELDS += ["context_parallel", "context_parallel.sizes", "context_parallel.layouts", "num_devices"]
FIELDS += ["recompute", "num_query_groups", "num_csx", "tolerance", "model.model_type", "model.head_dim", "trainer"]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.sampled_from(FIELDS), VALUES), min_size=1, max_size=3), hub=st.booleans())
def test_no_body_makes_the_service_fail(client: TestClient, changes: list[tuple[str, Any]], hub: bool) -> None:
    document: dict[str, Any] = copy.deepcopy(GPT2 if hub else REQUEST)
    for path, value in changes:
        *parents, last = path.split(".")
        owner = document
        for parent in parents:
            child = owner.setdefault(parent, {})
            owner = child if isinstance(child, dict) else owner
        owner[last] = value
    response = client.post(EXPLORATIONS, content=json.dumps(document), headers=JSON_HEADERS)
    assert response.status_code in {202, 422}, response.text
    if response.status_code == 422:
        assert_problem(response, 422)
