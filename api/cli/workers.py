"""`bexp workers`: the list of workers."""

from __future__ import annotations

from bexp.api.cli.arguments import AsJson
from bexp.api.cli.connection import connect
from bexp.api.cli.errors import say
from bexp.api.cli.results import print_json, print_table
from bexp.client.explorations import GpuReading, Worker
from bexp.explorer.model.target import describe_target


def workers(as_json: AsJson = False) -> None:
    """List the workers: their devices and versions, and what they do.

    A waiting worker has work, but another process has its device. A reserved worker waits for the exploration of the
    command that started it. A lost worker, whose heartbeats ended without a shutdown, is listed for a day.

    Example: bexp workers
    """
    with connect() as client:
        live = client.workers()
    if as_json:
        print_json([worker.model_dump(mode="json") for worker in live])
        return
    if not live:
        say("no worker is running; start one with `bexp worker`")
        return
    rows = []
    for worker in live:
        targets = ", ".join(describe_target(*item) for item in worker.targets.items())
        seen = f"{worker.last_heartbeat_at.astimezone():%Y-%m-%d %H:%M:%S}"
        hardware = f"{worker.num_devices} x {worker.device_name}" if worker.num_devices > 1 else worker.device_name
        torch = worker.versions.get("torch", "-")
        gpus = ", ".join(map(_reading, worker.gpus or ())) or "-"
        rows.append((worker.id, _state(worker), worker.devices, hardware or "-", gpus, torch, targets, seen))
    print_table(("ID", "STATE", "DEVICES", "HARDWARE", "GPU_USE", "TORCH", "TARGETS", "LAST_HEARTBEAT"), rows)
    for worker in live:
        if worker.state == "waiting":
            say(f"{worker.id} waits: {worker.held_by}")


def _state(worker: Worker) -> str:
    if worker.exploration is None:
        return "reserved" if worker.reserved and worker.state == "idle" else worker.state
    return f"{worker.state} {worker.exploration}"


def _reading(gpu: GpuReading) -> str:
    use = "" if gpu.busy_share is None else f"{gpu.busy_share:.0%}"
    heat = "" if gpu.temperature_celsius is None else f"{gpu.temperature_celsius} C"
    return f"{use} {heat}".strip() or "-"
