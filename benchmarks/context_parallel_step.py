"""Whole training steps on sequences that several devices share, by length and layout, and the explorer's choice.

    python -m benchmarks.context_parallel_step examples/llama-3.2-1b.yaml --num-devices 4 \\
        --out benchmarks/results/NAME.json

All devices (or `--sizes` of them) share every sequence, at micro-batch 1. For each length, the profiler behind
`bexp worker --group` runs every layout whole: all layers, embedding, loss, optimizer, exchange of gradients. It uses
the cheapest recomputation that is predicted to fit with all layouts. If one layout runs out of memory, all move to the
next policy. Rounds go through the layouts in turn, every other round backwards, so that drift favours none. Then the
explorer searches the same space by components, and the whole step of its choice is compared with the fastest.

A step processes one sequence if all devices share it, else one for each group of the smallest size. If the file exists,
the run continues it: what it has is not run again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.context_parallel_cells import Bench, Setup, UnservedError
from benchmarks.continuation import begin
from benchmarks.environment import describe_environment, write_results
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.workers.process.profiler import Profiler

SEQ_LENGTHS = (16384, 32768, 65536, 131072, 262144)


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write one JSON file; 1 if no layout of some length ran."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config", type=Path)
    parser.add_argument("--num-devices", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=list(SEQ_LENGTHS))
    parser.add_argument("--sizes", type=int, nargs="+", help="devices that share a sequence; default: all")
    parser.add_argument("--attention", help="back end; default: the one that torch's SDPA picks")
    parser.add_argument("--num-layers", type=int, help="of the model, instead of its own")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=540.0, help="begin nothing that would end later")
    parser.add_argument("--search-seconds", type=float, default=30.0, help="budget of the explorer for each length")
    parser.add_argument("--no-search", action="store_true", help="do not ask the explorer")
    parser.add_argument("--trial-seconds", type=float, default=420.0, help="deadline of a trial")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    if options.num_devices < 2:
        parser.error("--num-devices must be at least 2: a device alone shares no sequences")
    base = parse_request(load_document(options.config.read_text()))
    setup = Setup(
        num_devices=options.num_devices,
        sizes=tuple(sorted(set(options.sizes or (options.num_devices,)))),
        attention=options.attention,
        num_layers=options.num_layers or base.model.num_layers,
        search_seconds=options.search_seconds,
        trial_seconds=options.trial_seconds,
    )
    try:
        requests = {length: setup.request(base, length) for length in options.seq_lengths}
    except ValueError as error:
        parser.error(str(error))
    ranks = range(options.num_devices)
    devices = ["cpu" if options.device == "cpu" else f"cuda:{i}" for i in ranks]
    with Profiler(devices, on_wait=print) as profiler:
        fresh = {
            "environment": describe_environment(),
            "hardware": profiler.hardware().model_dump(mode="json"),
            "config": options.config.stem,
            "setup": setup.identity(base),
            "cells": [],
        }
        try:
            found = begin(options.out, fresh, same=("config", "setup"))
        except ValueError as error:
            parser.error(str(error))
        bench = Bench(setup, profiler, requests, found["cells"], deadline)
        try:
            for step in _steps(bench, options.rounds, search=not options.no_search):
                print(step, flush=True)
                write_results(options.out, found)
        except UnservedError as error:
            parser.error(str(error))
        found["left_out"] = bench.left_out(options.rounds, search=not options.no_search)
        write_results(options.out, found)
    print_table(found)
    return int(any(_failed(cell) for cell in found["cells"]))


def _steps(bench: Bench, rounds: int, *, search: bool) -> Iterator[str]:
    """Run a first round and a search for every length, then the other rounds; yield a line for each result."""
    for length in bench.requests:
        yield from bench.run_round(length, 0)
        if search:
            yield from bench.search(length)
    for turn in range(1, rounds):
        for length in bench.requests:
            yield from bench.run_round(length, turn)


def _failed(cell: dict[str, Any]) -> bool:
    """Whether nothing ran, for a reason other than time."""
    return not cell["layouts"] and (bool(cell["runs"]) or not any(cell["policies"].values()))


def print_table(found: dict[str, Any]) -> None:
    """Print a line per length and layout, and below them the explorer's choice."""
    setup = found["setup"]
    print(f"\n{found['config']}, {setup['num_devices']} devices, {setup['batch_size']} sequences a step")
    for cell in found["cells"]:
        print(f"S={cell['seq_length']} attention={cell['attention']}")
        for row in cell["layouts"]:
            over = f"{row['speed_over_ring']:.3f}x ring" if row["speed_over_ring"] else ""
            print(
                f"  {name_of(row):<12}{row['recompute']:<13}{row['step_seconds']:9.3f} s "
                f"{row['tokens_per_second']:10.0f} tokens/s/device {row['peak_bytes'] / 2**30:7.2f} GiB  {over}"
                f"{'  contaminated' if row['contaminated'] else ''}"
            )
        for run in cell["runs"]:
            if run["outcome"] not in {"ok", "contaminated"}:
                print(f"  {name_of(run):<12}{run['recompute']:<13}{run['outcome']}: {run['reason']}")
        for size, policies in cell["policies"].items():
            if not policies:
                print(f"  {size} devices: no recomputation is predicted to fit")
        choice = cell["choice"]
        if choice is not None:
            print(f"  {_choice(choice)}")
    for what in found["left_out"]:
        print(f"left out: {what}")


def name_of(row: dict[str, Any]) -> str:
    """`4:striped`, or `alone`."""
    return f"{row['size']}:{row['layout']}" if row["layout"] else "alone"


def _choice(choice: dict[str, Any]) -> str:
    chosen = "nothing" if choice["chosen"] is None else name_of(choice["chosen"])
    if choice["share_of_best"] is None:
        return f"the explorer chose {chosen}: {choice['reason']}"
    within = "within" if choice["within_tolerance"] else "not within"
    return (
        f"the explorer chose {chosen} (confidence {choice['confidence']}, {choice['seconds']:.0f} s): "
        f"{choice['share_of_best']:.3f} of the fastest, {name_of(choice['fastest'])}: "
        f"{within} {choice['tolerance']:.0%}"
    )


if __name__ == "__main__":
    sys.exit(main())
