"""Odd values in every place of many configurations: `python -m tests.chaos.fuzz_configurations --cases 500`.

The configurations are transformers' defaults of causal language models, shrunk. Each number of them becomes an extreme
one, each text an odd one. A submission must refuse that at its field, or a worker must get through the beginning of the
job: the class, the model, its parts and the check of them, with 8 GiB. There it may refuse the model, with a reason. A
submission that fails otherwise is a violation, and so is a process that dies. One that takes 30 s of a core is late: a
worker would wait for its deadline, twice. The result is JSON, with all that was late.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil

from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.request import parse_request
from bexp.explorer.request.request import ExplorationRequest
from tests.chaos.result import read_commit, write_document

TYPES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "gemma", "gemma2"),
    *("gemma3_text", "gemma3n_text", "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_oss", "gpt_bigcode", "opt", "bloom"),
    *("falcon", "falcon_h1", "phi", "phi3", "phimoe", "olmo2", "olmoe", "deepseek_v2", "deepseek_v3", "mamba"),
    *("mamba2", "jamba", "zamba2", "bamba", "nemotron_h", "recurrent_gemma", "granitemoehybrid", "lfm2", "mpt", "dbrx"),
)
SEQ_LENGTH = 16
INTEGERS = (0, -1, 1, 3, 512, 4096, 2**14, 2**16, 2**17, 2**25, 10**9, 2**31 - 1, 2**31, 2**63, -(2**31), -(2**63))
LONG, NAME = "x" * 100_000, "owner/name@main"
OTHERS: tuple[Any, ...] = (None, True, 1.5, -1e12, 1e308, "", "9" * 18, LONG, NAME, [], [1] * 5000, {"a": 1})
TEXTS: tuple[Any, ...] = ("", "load", LONG, NAME, "../../etc/passwd", "__class__", None, 1, ["full_attention"])
CPU_SECONDS, WALL_SECONDS = 30, 300.0
MEMORY_BYTES = 8 << 30

Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Case:
    """One value in one place of a configuration."""

    model_type: str
    place: Place
    value: Any

    def describe(self) -> str:
        """Return the case in a line."""
        return f"{self.model_type} {'.'.join(map(str, self.place))}={json.dumps(self.value):.60}"


def base_of(model_type: str) -> dict[str, Any]:
    """Return a small configuration of a type, with all that its class has by default."""
    from benchmarks.model_survey import survey_config
    from bexp.workers.targets.transformers.config import resolve_config
    from bexp.workers.targets.transformers.shrink import shrink

    made = resolve_config(survey_config(model_type), SEQ_LENGTH).config
    small = json.loads(json.dumps(shrink(made.to_dict(), 2), default=str).replace("Infinity", "1.0"))
    return {key: value for key, value in small.items() if value is not None} | {"model_type": model_type}


def cases_of(model_type: str, base: dict[str, Any]) -> Iterator[Case]:
    """Yield each odd value in each place of a configuration."""
    for place, value in _places(base):
        if isinstance(value, bool):
            odd: Sequence[Any] = OTHERS
        elif isinstance(value, int | float):
            odd = (*INTEGERS, *OTHERS)
        else:
            odd = TEXTS if isinstance(value, str) else OTHERS
        for each in odd:
            yield Case(model_type, place, each)


def _places(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    if place and place != ("model_type",):
        yield place, value
    items: Any = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*place, key))


def submit(base: dict[str, Any], case: Case) -> ExplorationRequest | str:
    """Return the request that a submission makes of a case, or why it refuses it."""
    config = copy.deepcopy(base)
    inner: Any = config
    for key in case.place[:-1]:
        inner = inner[key]
    inner[case.place[-1]] = case.value
    try:
        return parse_request({"hf_config": config, "hf_seq_length": SEQ_LENGTH, "quick": True})
    except FormatError as error:
        return str(error)


def begin(request: ExplorationRequest) -> str | None:
    """Do what a profiler does when a job begins; return why it refuses the model, or None."""
    import torch

    from bexp.workers.instruments.device_instruments import Instruments
    from bexp.workers.process.protocol import Begin, ReportReply
    from bexp.workers.profiler.session import Session
    from tests.contracts.samples import make_report

    sent: list[Any] = []
    session = Session(Instruments(torch.device("cpu")), None, sent.append)
    hardware = make_report().hardware.model_copy(update={"memory_limit_bytes": MEMORY_BYTES})
    session.answer(Begin(request=request, hardware=hardware))
    assert isinstance(sent[0], ReportReply)
    return sent[0].report.refusal


def begin_apart(request: ExplorationRequest) -> tuple[str, str]:
    """Begin a job in a fork with limits; return `works`, `refused`, `late` or `died`, and the reason."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _begin_in_child(request, write)
    os.close(write)
    ready, _, _ = select.select([read], [], [], WALL_SECONDS)
    if not ready:
        os.kill(pid, signal.SIGXCPU)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    if said:
        reason = json.loads(said)
        return ("works", "") if reason is None else ("refused", reason)
    code = os.waitstatus_to_exitcode(status)
    return ("late", "") if code == -signal.SIGXCPU else ("died", f"the process ended with status {code}")


def _begin_in_child(request: ExplorationRequest, write: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + MEMORY_BYTES,) * 2)
        until = int(time.process_time()) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (until, until + 5))
        os.write(write, json.dumps(begin(request)).encode())
    finally:
        os._exit(1)


def preload() -> None:
    """Import what each fork needs."""
    from bexp.workers.profiler import session  # noqa: F401 - forks need not import it
    from bexp.workers.targets.choice import import_target

    import_target("transformers")


def fuzz(types: Sequence[str], most: int | None, seed: int, seconds: float) -> dict[str, Any]:
    """Try cases, at most so many and as many as the time allows; return the result."""
    preload()
    until = time.monotonic() + seconds
    bases = {name: base_of(name) for name in types}
    cases = [case for name, base in bases.items() for case in cases_of(name, base)]
    Random(seed).shuffle(cases)
    ends: Counter[str] = Counter()
    late: list[str] = []
    violations: list[str] = []
    for case in cases[:most]:
        if time.monotonic() > until:
            break
        try:
            request = submit(bases[case.model_type], case)
        except Exception as error:  # noqa: BLE001 - a service would answer with 500
            violations.append(f"{case.describe()}: {error!r:.200}")
            continue
        if isinstance(request, str):
            ends["refused at submission"] += 1
            if "hf_config" not in request:
                violations.append(f"{case.describe()}: refused without its field: {request:.200}")
            continue
        end, reason = begin_apart(request)
        ends[end] += 1
        if end == "late":
            late.append(case.describe())
        if end == "died":
            violations.append(f"{case.describe()}: {reason}")
    return {
        "commit": read_commit(),
        "seed": seed,
        "types": len(types),
        "cases": sum(ends.values()),
        "of": len(cases),
        "ends": dict(sorted(ends.items())),
        "late": late[:100],
        "num_violations": len(violations),
        "violations": violations[:100],
    }


def main() -> int:
    """Fuzz, print the result, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.fuzz_configurations", description=__doc__)
    parser.add_argument("--types", nargs="*", default=TYPES, help="of configurations; default: 40")
    parser.add_argument("--cases", type=int, default=None, help="so many, drawn at random; default: all")
    parser.add_argument("--minutes", type=float, default=600.0, help="end earlier than after all cases")
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    parser.add_argument("--output", type=Path, help="a file for the JSON; default: standard output")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    found = fuzz(options.types, options.cases, seed, 60 * options.minutes)
    return write_document(found, options.output)


if __name__ == "__main__":
    sys.exit(main())
