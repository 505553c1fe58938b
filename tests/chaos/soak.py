"""Whether the processes of the service stay as small as they are: an hour of submissions, searches and followers."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import psutil

from tests.chaos.clients import document_of
from tests.chaos.processes import Service

MINUTE = 60.0
SAMPLE_SECONDS = 10.0
PAUSE_SECONDS = 1.0
"""Between an exploration that has ended and the next."""
NUM_TRIALS = 12
WARM_UP_SHARE = 1 / 3
"""Imports, caches and pools grow in the beginning."""
MOST_BYTES_AN_HOUR = 16 * 2**20
MOST_FILES_AN_HOUR = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process holds at a moment; seconds since the start."""

    seconds: float
    bytes: int
    files: int


def soak(service: Service, minutes: float) -> dict[str, Any]:
    """Submit an exploration, follow it to its end, list, and so on; measure how much each process grows an hour."""
    processes = {"api": service.api, **{f"worker {i}": worker for i, worker in enumerate(service.workers)}}
    watched = {name: psutil.Process(process.pid) for name, process in processes.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in watched}
    begun = time.monotonic()
    explorations, failed, next_sample = 0, list[str](), 0.0
    with httpx.Client(base_url=service.url, timeout=MINUTE) as client:
        while (seconds := time.monotonic() - begun) < minutes * MINUTE:
            if seconds >= next_sample:
                for name, process in watched.items():
                    with suppress(psutil.NoSuchProcess):
                        samples[name].append(Sample(seconds, process.memory_info().rss, process.num_fds()))
                next_sample = seconds + SAMPLE_SECONDS
            explorations += 1
            job_id = client.post("/v1/explorations", json=document_of(explorations, NUM_TRIALS)).json()["id"]
            with client.stream("GET", f"/v1/explorations/{job_id}/log", params={"follow": "true"}) as log:
                for _ in log.iter_lines():
                    pass
            state = client.get(f"/v1/explorations/{job_id}").json()["state"]
            failed += [] if state == "succeeded" else [f"{job_id} is {state}"]
            client.get("/v1/explorations")
            client.delete(f"/v1/explorations/{job_id}").raise_for_status()
            time.sleep(PAUSE_SECONDS)
    grown = {name: growth(found) for name, found in samples.items()}
    too_much = [
        f"{name} grows by {each['bytes_an_hour']} bytes and {each['files_an_hour']} files an hour"
        for name, each in grown.items()
        if each["bytes_an_hour"] > MOST_BYTES_AN_HOUR or each["files_an_hour"] > MOST_FILES_AN_HOUR
    ]
    ended = [f"{name} has ended" for name, process in watched.items() if not process.is_running()]
    told = {"minutes": round((time.monotonic() - begun) / MINUTE, 1), "explorations": explorations}
    each = [{"process": name, **figures} for name, figures in grown.items()]
    return told | {"processes": each, "violations": failed + too_much + ended}


def growth(samples: list[Sample]) -> dict[str, int]:
    """Fit a line through what a process held after its warm-up."""
    kept = samples[int(len(samples) * WARM_UP_SHARE) :]
    hours = np.array([sample.seconds for sample in kept]) / (60 * MINUTE)
    each = {"bytes": [sample.bytes for sample in kept], "files": [sample.files for sample in kept]}
    slopes = {f"{name}_an_hour": round(float(np.polyfit(hours, held, 1)[0])) for name, held in each.items()}
    return slopes | {f"last_{name}": held[-1] for name, held in each.items()}
