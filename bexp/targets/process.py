"""`python -P -m bexp.targets.process` measures one target. A profiler starts it; nobody starts it by hand.

It reads one JSON object a line from standard input, and answers each with one line on the standard output that it was
started with. What the target itself prints goes to standard error. It imports `bexp`, the target and its folder.

    {"command": "open", "reference": "/home/me/train.py:Target", "config": {...}, "device": "cuda:0",
     "optimizer": "adamw", "seed": 0, "memory_limit_bytes": ..., "context_bytes": ...}
    {"command": "describe"}
    {"command": "measure", "micro_batch_size": 4}
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from bexp.explorer.model.spelling import shortened
from bexp.measure import host_limits
from bexp.measure.step_checks import StepError
from bexp.out_of_memory import is_out_of_memory
from bexp.targets.loading import TargetError, load_target
from bexp.targets.run import TargetRun


class Served:
    """The target of this process, with one method for each command."""

    def __init__(self) -> None:
        self._run: TargetRun | None = None

    def open(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Load the target and build its model."""
        device = torch.device(command["device"])
        _limit_memory(device, int(command["memory_limit_bytes"]), int(command["context_bytes"]))
        target = load_target(command["reference"])
        dimensions = {name: list(values) for name, values in getattr(target, "dimensions", {}).items()}
        chosen = command["choice"] or {name: values[0] for name, values in dimensions.items()}
        torch.manual_seed(command["seed"])
        self._run = TargetRun(target, {**command["config"], **chosen}, device, command["optimizer"])
        return {"dimensions": dimensions}

    def describe(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """What the search must know of the model."""
        assert self._run is not None, "open comes first"
        return self._run.describe()

    def measure(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Seconds and bytes at one micro-batch size."""
        assert self._run is not None, "open comes first"
        return self._run.measure(int(command["micro_batch_size"]))


def answer(handle: Callable[[Mapping[str, Any]], dict[str, Any]], command: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply to one command: `outcome` ok with what was found, else an outcome with its reason."""
    try:
        return {"outcome": "ok", **handle(command)}
    except (TargetError, NotImplementedError) as error:
        return {"outcome": "unsupported", "reason": _one_line(error)}
    except StepError as error:
        return {"outcome": "crashed", "reason": _one_line(error)}
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {"outcome": "out_of_memory", "reason": _one_line(error)}
    except Exception as error:  # noqa: BLE001 - the target is the caller's, and any failure of it is an outcome
        traceback.print_exc()
        reason = f"{type(error).__name__}: {_one_line(error)}{_place(error)}"
        return {"outcome": "out_of_memory" if is_out_of_memory(error) else "crashed", "reason": reason}


def main() -> int:
    """Answer commands until standard input ends."""
    with _private_output() as replies:
        commands = _read_commands()
        cores = host_limits.usable_cores()
        torch.set_num_threads(max(1, min(torch.get_num_threads(), cores)))
        served = Served()
        while (line := commands.get()) is not None:
            command = json.loads(line)
            handle = {"open": served.open, "describe": served.describe, "measure": served.measure}[command["command"]]
            replies.write(json.dumps(answer(handle, command)) + "\n")
            replies.flush()
    return 0


def _read_commands() -> queue.SimpleQueue[bytes | None]:
    """Read commands in a thread. It ends the process with its parent, also in the middle of a step."""
    commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    lines = os.fdopen(os.dup(0), "rb")
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)  # a target that reads standard input takes no commands away
    os.close(devnull)

    def read() -> None:
        for line in lines:
            commands.put(line)
        os._exit(0)

    threading.Thread(target=read, name="commands", daemon=True).start()
    return commands


def _private_output() -> IO[str]:
    """The standard output that this process was started with; later prints go to standard error."""
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _limit_memory(device: torch.device, limit_bytes: int, context_bytes: int) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        total = torch.cuda.get_device_properties(device).total_memory
        # The profiler that started this process has a context on the device, too.
        share = max(1.0, limit_bytes - 2 * context_bytes) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    else:
        host_limits.limit_data(limit_bytes)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return shortened(lines[0], 500) if lines else type(error).__name__


def _place(error: BaseException) -> str:
    """The line of code that raised, as ` (train.py line 12)`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = Path(__file__).parents[1]
    others = [frame for frame in frames if own not in Path(frame.filename).parents]
    outside = [frame for frame in others if "site-packages" not in frame.filename and "<frozen" not in frame.filename]
    return f" ({Path(outside[-1].filename).name} line {outside[-1].lineno})" if outside else ""


if __name__ == "__main__":
    raise SystemExit(main())
