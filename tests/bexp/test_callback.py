from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

import bexp
from tests.bexp.recommendations import document

ARGS = SimpleNamespace(per_device_train_batch_size=4, gradient_accumulation_steps=2)
STATE = SimpleNamespace(is_world_process_zero=True)


def train(callback: Any, steps: int = 5) -> None:
    callback.on_train_begin(ARGS, STATE, None)
    for _ in range(steps):
        callback.on_step_begin(ARGS, STATE, None)
        callback.on_step_end(ARGS, STATE, None)
    callback.on_train_end(ARGS, STATE, None)


@pytest.fixture
def service() -> Iterator[tuple[str, list[tuple[str, str | None, Any]]]]:
    seen: list[tuple[str, str | None, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, self.headers["Authorization"], json.loads(body)))
            self.send_response(201)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_report_is_logged_beside_the_promise_and_posted(
    service: tuple[str, list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    url, seen = service
    callback = bexp.TrainerCallback(document(), service=url, token="secret")
    with caplog.at_level(logging.INFO, "bexp"):
        train(callback)
    assert "of 1,000 promised" in caplog.text
    [(path, authorization, body)] = seen
    assert path == "/v1/explorations/exp-1/run-reports"
    assert authorization == "Bearer secret"
    assert set(body) == {
        "tokens_per_second",
        "peak_bytes",
        "peak_reserved_bytes",
        "steps",
        "micro_batch_size",
        "seconds",
        "device_name",
        "versions",
    }
    assert body["steps"] == 2
    assert body["tokens_per_second"] == pytest.approx(2 * 4 * 2 * 12 / body["seconds"])


def test_a_service_that_does_not_answer_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    callback = bexp.TrainerCallback(document(), service="http://127.0.0.1:9")
    train(callback)
    assert callback.report is not None
    assert "was not sent" in caplog.text


def test_a_short_run_reports_nothing() -> None:
    callback = bexp.TrainerCallback(document())
    train(callback, steps=3)
    assert callback.report is None
    assert callback.comparison() == "nothing was measured"


def test_evaluations_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("bexp.callback.time.monotonic", lambda: now[0])
    callback = bexp.TrainerCallback(document())
    callback.on_train_begin(ARGS, STATE, None)
    for step in range(7):
        callback.on_step_begin(ARGS, STATE, None)
        now[0] += 1.0
        callback.on_step_end(ARGS, STATE, None)
        if step in {4, 6}:
            now[0] += 50.0
            callback.on_evaluate(ARGS, STATE, None)
    callback.on_train_end(ARGS, STATE, None)
    assert callback.report is not None
    assert callback.report.seconds == pytest.approx(4.0)
