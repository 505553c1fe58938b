"""`python -m bexp.workers` runs a worker; with `doctor` it shows which devices a worker could use here."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bexp.measure.device_names import RECORDED, parse_devices
from bexp.workers.devices.discovery import default_devices, device_key, parse_counts, visible_devices
from bexp.workers.process.start import StartedProcess, process_environment, uses_spares
from bexp.workers.settings import WorkerSettings, read_settings

if TYPE_CHECKING:
    from bexp.workers.process.interface import DeviceProfiler

USAGE = 2
"""The exit status of a wrong command line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bexp worker", description="Claim explorations and run them.")
    commands = parser.add_subparsers(dest="command", metavar="doctor")
    doctor = commands.add_parser("doctor", help="show which devices and back ends can be used, and why others cannot")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--device",
        help="cpu, cuda:0, cuda:0-3 or replay:TABLE (a recorded table); default: the first GPU, else the CPU",
    )
    parser.add_argument(
        "--group",
        action="store_true",
        help="one worker for all of the devices (cuda:0-3, or cpu,cpu for two processes on the CPU), for jobs whose "
        "devices share sequences; without --device all GPUs; default: one worker per device",
    )
    parser.add_argument(
        "--num-devices",
        metavar="N[,N...]",
        help="without --device: use this number of GPUs, or the largest of several numbers that the host has; "
        "default: one, with --group all",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run trials on all devices of a Ray cluster (auto: the cluster of this host); --device then says what a "
        "trial needs: cpu, cuda:0, or cuda:0-3 for four GPUs of a host; default: one GPU",
    )
    parser.add_argument("--database-url", help="default: BEXP_DATABASE_URL, else a SQLite file of this user")
    parser.add_argument("--max-jobs", type=int, metavar="N", help="end after N jobs on each device")
    parser.add_argument(
        "--job",
        metavar="ID",
        help="end with this exploration; it is cancelled when standard input is closed",
    )
    parser.add_argument("--name", default="", help="with --job: run what is stored for a worker of this name alone")
    options = parser.parse_args(arguments)
    if (options.job is None) != (not options.name):
        parser.error("--job and --name go together")
    if options.max_jobs is not None and options.max_jobs < 1:
        parser.error("--max-jobs must be at least 1")
    if options.group and options.ray is not None:
        parser.error("--group and --ray exclude each other: on a cluster --device says what a trial needs")
    if options.num_devices is not None and (options.device is not None or options.ray is not None):
        parser.error("--num-devices chooses among the GPUs of this host where neither --device nor --ray does")
    if options.command == "doctor":
        from bexp.workers.doctor import main as diagnose  # noqa: PLC0415 - a worker needs none of it

        return diagnose(options.json)

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("bexp.workers").setLevel(logging.INFO)
    with ExitStack() as ends:
        try:
            settings = read_settings()
            profilers = _profilers(options, settings)
            for profiler in profilers.values():
                ends.callback(profiler.close)
            from bexp.workers.serving import build_workers, run_workers  # noqa: PLC0415 - while the other one imports

            workers = build_workers(profilers, options.database_url or settings.database_url, settings, options.name)
        except ValueError as error:
            parser.exit(USAGE, f"bexp worker: {error}\n")
        except OSError as error:
            parser.exit(USAGE, f"bexp worker: a file cannot be opened: {error.strerror}: {error.filename}\n")
        return run_workers(workers, options.max_jobs, options.job)


def _profilers(options: argparse.Namespace, settings: WorkerSettings) -> dict[str, DeviceProfiler]:
    if options.ray is not None:
        from bexp.workers.ray.pool import RayDevicePool  # noqa: PLC0415 - few need it

        needed = ("cuda:0",) if options.device is None else parse_devices(options.device)
        return {f"ray-{needed[0]}": RayDevicePool(options.ray, needed)}
    if options.device is not None and options.device.startswith(RECORDED):
        from bexp.workers.replay.profiler import ReplayProfiler  # noqa: PLC0415 - few need it

        return {"replay": ReplayProfiler(Path(options.device.removeprefix(RECORDED)))}
    given, started = settings.environment, {}
    owned = _devices(options.device, options.num_devices, settings, group=options.group)
    for devices in filter(uses_spares, owned):  # they import torch while this process imports all else
        environment = process_environment(given, devices)
        device_key(devices[0], environment)  # raises if there is no such device
        with suppress(OSError):  # the profiler tries again, with pauses
            started[devices] = StartedProcess(devices, environment)
    from bexp.workers.process.profiler import Profiler  # noqa: PLC0415 - while the other one imports

    profilers: dict[str, DeviceProfiler] = {}
    for devices in owned:
        name = devices[0] if len(devices) == 1 else f"{devices[0]}+{len(devices) - 1}"
        profilers[name] = profiler = Profiler(devices, environment=given, started=started.get(devices))
        profiler.prepare()
    return profilers


def _devices(
    given: str | None, num_devices: str | None, settings: WorkerSettings, *, group: bool
) -> tuple[tuple[str, ...], ...]:
    """The devices of each worker: one device each, or all devices in one worker if `group` is set."""
    if given is None:
        counts = None if num_devices is None else parse_counts(num_devices)
        devices = default_devices(visible_devices(settings.environment), group=group, counts=counts)
    else:
        devices = parse_devices(given)
    if group:
        return (devices,)
    if len(set(devices)) < len(devices):
        raise ValueError(f"device '{given}' names a device twice, which only --group can use")
    return tuple((device,) for device in devices)


if __name__ == "__main__":
    sys.exit(main())
