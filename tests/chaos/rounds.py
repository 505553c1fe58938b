"""Rounds of campaigns, until somebody ends them. A file keeps what each did, so a later call goes on."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.chaos.campaign import Plan, run_campaign
from tests.chaos.result import Result, document_of_result, read_commit

RunCampaign = Callable[[Plan, threading.Event], Result]


def run_rounds(num: int, plan: Plan, path: Path, *, run: RunCampaign = run_campaign) -> int:
    """Run `num` more rounds with the plan, each on SQLite and PostgreSQL at once, or fewer after SIGTERM or SIGINT.

    One campaign often waits for a database that is away, and leaves the processor to the other meanwhile. A signal ends
    the faults of the round that runs; it is checked and stored like the others.

    Returns:
        How many violations the file holds.
    """
    ending = threading.Event()
    before = {number: signal.signal(number, lambda *_: ending.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        rounds = read_rounds(path)
        with ThreadPoolExecutor() as pool:
            for _ in range(num):
                if ending.is_set():
                    break
                both = [replace(plan, seed=secrets.randbelow(1 << 31), postgres=each) for each in (False, True)]
                campaigns = [pool.submit(_run_campaign, each, ending, run) for each in both]
                while wait(campaigns, timeout=1.0).not_done:
                    pass  # a signal that comes just before this thread waits is handled when it has waited
                rounds = add_rounds(path, [campaign.result() for campaign in campaigns])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return sum(len(done["violations"]) for done in rounds)


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Return the campaigns that a file holds; none if there is no file yet."""
    return list(json.loads(path.read_text())["rounds"]) if path.exists() else []


def add_rounds(path: Path, rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add rounds to a file, one process at a time, and return all that it holds then."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        found = [*read_rounds(path), *rounds]
        lines = ",\n".join(map(json.dumps, found))
        new = path.with_suffix(".new")
        new.write_text(f'{{"rounds": [\n{lines}\n]}}\n')
        new.replace(path)
    finally:
        os.close(folder)
    return found


def _run_campaign(plan: Plan, ending: threading.Event, run: RunCampaign) -> dict[str, Any]:
    try:
        return document_of_result(run(plan, ending))
    except Exception as error:  # noqa: BLE001 - it is lost, and those beside, before and after it are not
        traceback.print_exc()
        lost = Result(read_commit(), "PostgreSQL" if plan.postgres else "SQLite", plan.seed)
        lost.violations.append(f"the campaign stopped: {type(error).__name__}: {error}")
        return document_of_result(lost)
