"""Metrics in Prometheus' text format: the queue, the workers, the trials and the requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bexp.storage.database import Database
from bexp.storage.statistics import Statistics, read_statistics

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

QUANTILES = (0.5, 0.95)

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """The metrics of one application, separate from those of others in the same process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._latency = Histogram(
            "bexp_http_request_seconds",
            "Seconds from a request to the start of its response.",
            ("method", "route", "status"),
            registry=self._registry,
        )
        self._trouble = Gauge(
            "bexp_background_trouble",
            "1 while a background task of this process does not do its work.",
            registry=self._registry,
        )
        build = Gauge("bexp_build_info", "1; the version is in the label.", ("version",), registry=self._registry)
        build.labels(metadata.version("bexp")).set(1)
        self._streams = Gauge("bexp_event_streams", "Open streams that wait for events.", registry=self._registry)

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._latency.labels(method, route, str(status)).observe(seconds)

    def render(self, database: Database, num_streams: int, *, is_troubled: bool) -> bytes:
        """Return all metrics as text; this reads the database.

        `is_troubled` says that a background task of this process does not do its work.
        """
        self._streams.set(num_streams)
        self._trouble.set(is_troubled)
        stored = CollectorRegistry()
        stored.register(_StoredCounts(read_statistics(database)))
        return generate_latest(stored) + generate_latest(self._registry)


class _StoredCounts(Collector):
    """Counts that are stored in the database."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        counts = self._statistics
        by_state = [([state.value], number) for state, number in counts.jobs_by_state.items()]
        yield _labelled("bexp_jobs", "Explorations by state.", ["state"], by_state)
        yield GaugeMetricFamily(
            "bexp_jobs_without_worker", "Explorations that no live worker can run.", counts.num_without_worker
        )
        yield GaugeMetricFamily(
            "bexp_jobs_held_back", "Explorations that wait because of their owner's quota.", counts.num_held_back
        )
        yield GaugeMetricFamily(
            "bexp_reused_jobs", "Explorations that were answered from what is stored.", counts.num_reused
        )
        seconds = counts.recent_answer_seconds
        yield _labelled(
            "bexp_recent_answer_seconds",
            "Seconds from submission to the measured answer, of explorations that finished within the last hour.",
            ["quantile"],
            [([str(quantile)], seconds[int(quantile * len(seconds))]) for quantile in QUANTILES if seconds],
        )
        yield GaugeMetricFamily(
            "bexp_oldest_queued_seconds",
            "Seconds that the oldest of the queued explorations has waited that no quota holds back; 0 without one.",
            counts.oldest_queued_seconds,
        )
        kinds = sorted({"cpu", "cuda", *counts.workers_by_device_kind})
        by_kind = [([kind], counts.workers_by_device_kind.get(kind, 0)) for kind in kinds]
        yield _labelled("bexp_workers", "Live workers by kind of device.", ["device_kind"], by_kind)
        yield GaugeMetricFamily(
            "bexp_lost_workers",
            "Workers that went silent within a day and did not shut down.",
            counts.num_lost_workers,
        )
        description = "Live workers by target that they can measure."
        yield _labelled(
            "bexp_worker_targets", description, ["target", "version"], sorted(counts.workers_by_target.items())
        )
        by_outcome = [([outcome.value], number) for outcome, number in counts.trials_by_outcome.items()]
        yield _labelled("bexp_trials", "Stored trials by outcome.", ["outcome"], by_outcome)


def _labelled(
    name: str, description: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, description, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family


class LatencyMiddleware:
    """Times each request to the start of its response, so that a stream's length does not count."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        started = False

        def observe(status: int) -> None:
            # The label is the template and not the path, because the labels of a histogram must be few.
            route = getattr(scope.get("route"), "path", "unmatched")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.observe_request(method, route, status, time.perf_counter() - start)

        async def send_observed(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                observe(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, send_observed)
        finally:
            if not started:  # an exception, which an outer layer turns into a response, or a client that has left
                observe(500)
