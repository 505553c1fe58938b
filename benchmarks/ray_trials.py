"""Explorations whose trials run on a Ray cluster of this host.

    python -m benchmarks.ray_trials benchmarks/published/llama-3.2-1b.json --num-gpus 2 --out results/NAME.json
    python -m benchmarks.ray_trials CONFIG --num-gpus 0 --seq-length 64 --out FILE

The cluster begins and ends with the run. For each of its rows a worker is started with `bexp worker --ray auto`, and
the configuration is submitted to it through a new database, as by `bexp submit`:

- `single`: each GPU is an actor (without GPUs each CPU is one), so that as many trials run at the same time;
- `group`: all GPUs are one actor, and the training is sharded over them with ZeRO-3.

Rows in an existing FILE with the same options are kept if they succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.default_answers import stored_row
from benchmarks.environment import describe_commit, describe_environment, write_results
from bexp.child_process import module_command

Row = dict[str, Any]
RAY = (sys.executable, "-m", "ray.scripts.scripts")
START = ("start", "--head", "--block", "--include-dashboard=false", "--disable-usage-stats")
SUCCEEDED = "succeeded"
SHARDED = ("--set", "training.sharding=zero3")


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a cluster, and run the rows that the file lacks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_trials", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--num-gpus", type=int, default=2)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-seconds", type=float, default=60.0, help="of an exploration")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds after which an exploration is given up")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    asked_for = {name: getattr(options, name) for name in ("num_gpus", "seq_length", "batch_size", "max_seconds")}
    asked_for |= {"config": options.config.stem, "ray": version("ray")}
    stored: dict[str, Row] = json.loads(options.out.read_text())["rows"] if options.out.exists() else {}
    rows = {name: row for name, row in stored.items() if row["state"] == SUCCEEDED and row.get("options") == asked_for}
    number = options.num_gpus
    needs = {"single": ("cuda:0", ("--device", "cuda")), "group": (f"cuda:0-{number - 1}", SHARDED)}
    if number == 0:
        needs = {"single": ("cpu", ("--device", "cpu"))}
    elif number == 1:
        del needs["group"]
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # short: it holds sockets
        own = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder}
        start = [*RAY, *START, "--num-gpus", str(number)]
        cluster = subprocess.Popen(start, env=own, stdout=subprocess.PIPE, text=True)
        try:
            assert cluster.stdout is not None
            if not any("runtime started" in line for line in cluster.stdout):
                raise RuntimeError("Ray did not start")
            for name in [name for name in needs if name not in rows]:
                device, asked = needs[name]
                shared = ("--num-devices", str(number)) if name == "group" else ()
                found = explore(device, (*asked, *shared), options, own)
                rows[name] = {"commit": describe_commit(), "options": asked_for, **found}
                print(name, {key: value for key, value in rows[name].items() if key not in UNPRINTED}, flush=True)
                write_results(options.out, {"environment": describe_environment(), "rows": rows})
        finally:
            cluster.terminate()
            cluster.wait()
    return 0 if all(row["state"] == SUCCEEDED for row in rows.values()) else 1


UNPRINTED = ("hardware", "lines", "answer", "trials")


def explore(device: str, asked: Sequence[str], options: argparse.Namespace, environment: Mapping[str, str]) -> Row:
    """Submit the configuration to a worker whose trials need `device`, and return what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/bexp.db"
        own = {**environment, "BEXP_DATABASE_URL": url}
        sizes = ["--seq-length", str(options.seq_length), "--batch-size", str(options.batch_size)]
        limit = ["--max-seconds", str(options.max_seconds)]
        submit = module_command("bexp.api.cli", "submit", str(options.config.resolve()), *sizes, *limit, *asked)
        command = module_command("bexp.api.cli", "worker", "--ray", "auto", "--device", device)
        begun, begun_at = time.monotonic(), time.time()
        subprocess.run(submit, env=own, check=True)
        worker = subprocess.Popen(command, env=own)
        try:
            while True:
                time.sleep(1.0)
                row = stored_row(url, begun_at)
                if row["state"] in (SUCCEEDED, "failed", "cancelled") or worker.poll() is not None:
                    break
                if time.monotonic() - begun > options.limit:
                    break
        finally:
            worker.terminate()
            worker.wait()
    return row


if __name__ == "__main__":
    raise SystemExit(main())
