from __future__ import annotations

from datetime import timedelta
from importlib import metadata
from pathlib import Path

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from bexp.api.settings import ServiceSettings
from bexp.storage.leases import Lease
from bexp.storage.queue import Queue
from bexp.storage.tables import jobs, workers
from bexp.storage.workers import register_worker
from tests.api.problems import assert_problem
from tests.api.serving import in_process
from tests.contracts.samples import make_progress, make_request, make_worker


def read_metrics(client: TestClient) -> dict[str, float]:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in response.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_a_database_without_the_schema_is_alive_and_not_ready(tmp_path: Path) -> None:
    settings = ServiceSettings(f"sqlite:///{tmp_path / 'empty.db'}", waiting_check_seconds=0.01)
    with in_process(settings, raise_server_exceptions=False) as client:
        assert client.get("/healthz").json() == {"status": "alive"}
        response = client.get("/readyz")
        assert_problem(response, 503)
        assert "bexp db upgrade" in response.json()["detail"]
        for path in ("/v1/explorations", "/v1/explorations/0", "/metrics"):
            response = client.get(path)
            assert_problem(response, 503)
            assert response.headers["Retry-After"]


def test_a_database_that_cannot_be_reached_is_a_problem() -> None:
    settings = ServiceSettings("postgresql://nobody@127.0.0.1:1/none")
    with in_process(settings, raise_server_exceptions=False) as client:
        assert client.get("/healthz").status_code == 200
        assert_problem(client.get("/readyz"), 503)
        assert_problem(client.get("/v1/explorations"), 503)
        assert_problem(client.get("/v1/explorations/0/events"), 503)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_can_be_asked_without_a_body(client: TestClient, path: str) -> None:
    response = client.head(path)
    assert response.status_code == 200


def test_an_absent_worker_does_not_take_the_api_away(client: TestClient) -> None:
    assert client.get("/readyz").json() == {"status": "ready"}
    assert read_metrics(client)['bexp_workers{device_kind="cpu"}'] == 0


def test_metrics_count_jobs_workers_trials_and_requests(client: TestClient, queue: Queue, lease: Lease) -> None:
    queue.enqueue(make_request())
    queue.record(lease, make_progress(0))
    register_worker(
        queue.database,
        make_worker("worker-1", device_kind="cuda", device_name="NVIDIA H200", targets={"transformers": "5.23.0"}),
    )
    register_worker(queue.database, make_worker("worker-2", targets={}))
    done = [queue.enqueue(make_request(seed=1 + number))[0] for number in range(3)]
    with queue.database.begin() as connection:
        now = queue.database.now(connection)
        silent = sa.update(workers).where(workers.c.id == "worker-2")
        connection.execute(silent.values(last_seen_at=now - timedelta(minutes=1)))
        for seconds, job in zip((90, 10, 30), done, strict=True):
            here = sa.update(jobs).where(jobs.c.id == job.id)
            created_at = now - timedelta(seconds=seconds)
            connection.execute(here.values(state="succeeded", created_at=created_at, finished_at=now))
    client.get(f"/v1/explorations/{lease.job_id}")
    client.get("/v1/explorations/unknown/trials")
    client.get("/favicon.ico")
    found = read_metrics(client)
    assert found[f'bexp_build_info{{version="{metadata.version("bexp")}"}}'] == 1
    assert found['bexp_jobs{state="queued"}'] == 1
    assert found['bexp_jobs{state="running"}'] == 1
    assert found["bexp_jobs_without_worker"] == found["bexp_reused_jobs"] == found["bexp_background_trouble"] == 0
    assert found['bexp_recent_answer_seconds{quantile="0.5"}'] == pytest.approx(30)
    assert found['bexp_recent_answer_seconds{quantile="0.95"}'] == pytest.approx(90)
    assert found["bexp_lost_workers"] == 1
    assert found["bexp_oldest_queued_seconds"] > 0
    assert found['bexp_workers{device_kind="cuda"}'] == 1
    assert found['bexp_worker_targets{target="transformers",version="5.23.0"}'] == 1
    assert found['bexp_trials{outcome="ok"}'] == 1
    count = 'bexp_http_request_seconds_count{method="GET",route="%s",status="%s"}'
    assert found[count % ("/v1/explorations/{exploration_id}", 200)] == 1
    assert found[count % ("/v1/explorations/{exploration_id}/trials", 404)] == 1
    assert found[count % ("unmatched", 404)] == 1
    taken = count.replace("_count", "_sum") % ("/v1/explorations/{exploration_id}", 200)
    assert 0 < found[taken] < 10


def test_a_request_that_fails_is_counted_once(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("bexp.api.routes.workers.read_workers", fail)
    assert_problem(client.get("/v1/workers"), 500)
    counted = {name: count for name, count in read_metrics(client).items() if "seconds_count" in name}
    assert counted == {'bexp_http_request_seconds_count{method="GET",route="/v1/workers",status="500"}': 1}


def test_two_applications_count_apart(settings: ServiceSettings, client: TestClient) -> None:
    client.get("/healthz")
    with in_process(settings) as other:
        assert not any("/healthz" in name for name in read_metrics(other))
