"""Variable-sized grouped GEMMs: every case on every back end, on the whole card and within 16 GiB.

    python -m benchmarks.variable_gemm --out results/NAME.json [--quick] [--seconds S]

The product is the first projection of an expert FFN, hidden_size to 4 * hidden_size, for rows sorted by expert: alone,
and with both gradients. Rows are split over the experts at random, or as a case says. The dtypes are bfloat16, float16,
and float32 without TF32. In the same run every result is compared with float64 (relative error in norm, see
`projected_errors`); outputs are filled with NaN beforehand. Times are those of the profiler's timer, as in
`benchmarks.kernels`.

"Within 16 GiB" means that torch's allocator may reserve at most 16 GiB minus the device's context. This counts a
contender's operands, products, gradients and temporary buffers, but nothing that only the benchmark holds. Such runs
are checked and not timed, because the kernels are the same. If the operands alone are larger, they are so for every
contender.

Each contender runs in a process that is replaced if it crashes or hangs. The uneven distribution and the even split of
the same number of rows are timed in the order even, uneven, uneven, even. One counts as faster if both of its times
are.

If the file exists, the run continues it: its runs are kept, except those of incomplete comparisons.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.continuation import begin
from benchmarks.environment import describe_environment, write_results
from benchmarks.gemm_cases import OTHERS, PAIR, TELLING, Case
from benchmarks.gemm_contenders import BASELINES, CHOSEN, OURS
from benchmarks.gemm_runs import TOLERANCES, TOO_LARGE, WRONG, Run, contenders, device_hardware, run
from benchmarks.isolation import Isolated, Lost
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.spec.model import DType
from bexp.kernels.experts.auto.digest import kernels_digest

LIMIT_BYTES = 16 << 30
SECONDS, QUICK_SECONDS = 150.0, 60.0
RUN_SECONDS, START_SECONDS = 60.0, 180.0
DTYPES = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
FIRST = ("bmm", *OURS, *CHOSEN)
"""The contenders that come first and that a cell must have to count: ours, and the padded one."""
LEFT_OUT = "left_out"
SAME = ("kernels", "options", "limit_bytes", "tf32", "tolerances", "contenders", "cases")


@dataclass(frozen=True, slots=True)
class Cell:
    """Contenders on one case, one after the other."""

    case: Case
    dtype: DType
    limit_bytes: int | None = None


def main(arguments: list[str] | None = None) -> int:
    """Run what there is time for and write one JSON file; 1 if a result was wrong or a process was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="bfloat16 and the most telling cases, within 60 s")
    parser.add_argument("--seconds", type=float, help=f"start nothing after so long (default {SECONDS:g})")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shrink", type=int, default=1, help="divide tokens and widths by this, for small machines")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + (options.seconds or (QUICK_SECONDS if options.quick else SECONDS))
    with Isolated() as isolated:
        hardware = isolated.call(device_hardware, options.device, seconds=START_SECONDS)
        if isinstance(hardware, Lost):
            parser.error(f"{options.device}: {hardware.reason}")
        groups = list(tasks(quick=options.quick, limited=hardware["device_kind"] == "cuda", shrink=options.shrink))
        cases = dict.fromkeys(cell.case for group in groups for cell, _ in group)
        fresh = {
            "environment": describe_environment(),
            "hardware": hardware,
            "options": {"device": options.device, "quick": options.quick, "shrink": options.shrink},
            "kernels": kernels_digest(),
            "limit_bytes": LIMIT_BYTES,
            "context_bytes": hardware["context_bytes"],
            "tf32": False,
            "tolerances": {dtype.value: tolerance for dtype, tolerance in TOLERANCES.items()},
            "contenders": {"baselines": list(BASELINES), "ours": list(OURS), "chosen": list(CHOSEN)},
            "cases": {case.name: _describe(case) for case in cases},
            "runs": [],
            "left_out": [],
            "restarts": 0,
        }
        try:
            found = begin(options.out, fresh, same=SAME)
        except ValueError as error:
            parser.error(str(error))
        todo, kept = remaining(groups, found["runs"])
        if found["runs"]:
            again = len(found["runs"]) - len(kept)
            say = f", and {again} of incomplete comparisons are repeated" if again else ""
            print(f"{options.out}: {len(kept)} runs are kept and not measured again{say}")
        restarts, found["runs"] = found["restarts"], kept
        found["left_out"] = [_key(*task) for group in todo for task in group]
        for group in todo:
            if time.monotonic() > deadline:
                break
            for cell, contender in group:
                task = Run(
                    cell.case, cell.dtype, contender, options.device, cell.limit_bytes, found["context_bytes"],
                    timed=cell.limit_bytes is None,
                )  # fmt: skip
                found["runs"].append(_key(cell, contender) | call(isolated, task))
                found["left_out"].pop(0)
                found["restarts"] = restarts + isolated.restarts
                write_results(options.out, found | {"summary": summary(found)})
    found["summary"] = summary(found)
    if len(found["runs"]) > len(kept) or not options.out.exists():
        write_results(options.out, found)
    print_table(found)
    bad = {WRONG, Outcome.CRASHED.value, Outcome.TIMED_OUT.value}
    return int(any(row[of]["outcome"] in bad for row in found["runs"] for of in ("training", "forward")))


def tasks(*, quick: bool, limited: bool, shrink: int = 1) -> Iterator[tuple[tuple[Cell, str], ...]]:
    """The runs, the most informative first: a cell by one contender, or the four times of a comparison."""
    dtypes = DTYPES[:1] if quick else DTYPES
    names = tuple(contenders())
    pair = [case.shrunk(shrink) for case in PAIR]
    cells = []
    for dtype in dtypes:
        for case in TELLING if quick else (*TELLING, *OTHERS):
            whole = Cell(case.shrunk(shrink), dtype)
            cells += [whole, replace(whole, limit_bytes=LIMIT_BYTES)] if limited else [whole]
        if limited:
            cells.append(Cell(pair[1], dtype, LIMIT_BYTES))
    yield from (((cell, name),) for cell in cells for name in names if name in FIRST)
    for dtype in dtypes:
        for name in names:
            yield tuple((Cell(case, dtype), name) for case in (*pair, *pair[::-1]))
    yield from (((cell, name),) for cell in cells for name in names if name not in FIRST)


def remaining(
    groups: Iterable[tuple[tuple[Cell, str], ...]], runs: list[dict[str, Any]]
) -> tuple[list[tuple[tuple[Cell, str], ...]], list[dict[str, Any]]]:
    """What is not among the runs, and the runs that are kept: those of an incomplete comparison are not."""
    done = Counter(_row_key(row) for row in runs)
    todo = []
    for group in groups:
        wanted = Counter(_row_key(_key(*task)) for task in group)
        if any(done[key] < count for key, count in wanted.items()):
            todo.append(group)
    again = {_row_key(_key(*task)) for group in todo for task in group}
    return todo, [row for row in runs if _row_key(row) not in again]


def call(isolated: Isolated, task: Run) -> dict[str, Any]:
    """The outcomes of a run, also of one that took its process down."""
    started = isolated.restarts
    found = isolated.call(run, task, seconds=RUN_SECONDS)
    if isinstance(found, Lost):
        outcome = Outcome.TIMED_OUT if found.timed_out else Outcome.CRASHED
        lost = {"outcome": outcome.value, "reason": found.reason}
        return {"training": lost, "forward": lost}
    return dict(found) | ({"in_new_process": True} if isolated.restarts != started else {})


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Whether every case passes with ours, where memory ran out, and whether uneven is faster.

    A cell is a case in a number format under a memory limit. Cells that lack one of ours or bmm for want of time do not
    count, nor do those whose operands alone exceed the limit, in the passes for which they do.
    """
    ours = found["contenders"]["ours"]
    names = _names(found)
    result: dict[str, Any] = {}
    for of in ("forward", "training"):
        cells: dict[tuple[str, str, int | None], dict[str, str]] = {}
        for row in found["runs"]:
            key = row["case"], row["dtype"], row["limit_bytes"]
            cells.setdefault(key, dict.fromkeys(names, LEFT_OUT))[row["contender"]] = row[of]["outcome"]
        first = [name for name in names if name in ours or name in FIRST]
        cells = {key: outcomes for key, outcomes in cells.items() if LEFT_OUT not in map(outcomes.get, first)}
        feasible = {key: outcomes for key, outcomes in cells.items() if TOO_LARGE not in outcomes.values()}
        counts = {name: Counter(outcomes[name] for outcomes in feasible.values()) for name in names}
        failed = [key for key, outcomes in feasible.items() if not any(outcomes[name] == Outcome.OK for name in ours)]
        result[of] = {
            "cells": len(feasible),
            "cells_larger_than_the_limit": len(cells) - len(feasible),
            "cells_passed_by_ours": len(feasible) - len(failed),
            "cells_not_passed_by_ours": [
                dict(zip(("case", "dtype", "limit_bytes"), key, strict=True)) for key in failed
            ],
            "outcomes": counts,
            "out_of_memory": [
                {name: row[name] for name in ("case", "dtype", "limit_bytes", "contender")}
                for row in found["runs"]
                if row[of]["outcome"] == Outcome.OUT_OF_MEMORY
            ],
        }
    return result | {"uneven_over_even": _uneven_over_even(found["runs"])}


def _uneven_over_even(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds of the uneven distribution over those of the even split, by contender, dtype and passes."""
    even, uneven = (case.name for case in PAIR)
    rows = []
    for dtype, name in dict.fromkeys((row["dtype"], row["contender"]) for row in runs):
        mine = [row for row in runs if (row["dtype"], row["contender"], row["limit_bytes"]) == (dtype, name, None)]
        for of in ("forward", "training"):
            evens, unevens = (
                [row[of]["seconds"] for row in mine if row["case"] == case and "seconds" in row[of]]
                for case in (even, uneven)
            )
            if len(evens) < 2 or len(unevens) < 2:
                continue
            verdict = "faster" if max(unevens) < min(evens) else "slower" if min(unevens) > max(evens) else "level"
            ratio = statistics.mean(unevens) / statistics.mean(evens)
            rows.append({"dtype": dtype, "contender": name, "of": of, "ratio": ratio, "verdict": verdict})
    return rows


def print_table(found: dict[str, Any]) -> None:
    """TFLOP/s forward and backward of each contender, or why there are none, and the summary."""
    names = _names(found)
    print("TFLOP/s of forward, dX and dW on the whole card; what became of it within 16 GiB")
    print(f"{'case':<32}{'dtype':<10}{'memory':<8}" + "".join(f"{name[:15]:>16}" for name in names))
    cells: dict[tuple[str, str, int | None], dict[str, list[dict[str, Any]]]] = {}
    for row in found["runs"]:
        key = (row["case"], row["dtype"], row["limit_bytes"])
        cells.setdefault(key, {}).setdefault(row["contender"], []).append(row)
    for (case, dtype, limit), rows in cells.items():
        shown = "".join(f"{_shown(rows.get(name, [])):>16}" for name in names)
        print(f"{case:<32}{dtype:<10}{'whole' if limit is None else f'{limit >> 30} GiB':<8}{shown}")
    result = found["summary"]
    for of in ("forward", "training"):
        part = result[of]
        print(f"{of}: {part['cells_passed_by_ours']} of {part['cells']} cells pass with ours; ", end="")
        print("; ".join(f"{name} {part['outcomes'][name].get(Outcome.OK, 0)}" for name in names))
        for row in part["out_of_memory"]:
            memory = "whole card" if row["limit_bytes"] is None else f"{row['limit_bytes'] >> 30} GiB"
            print(f"{of}, out of memory: {row['contender']} {row['case']} {row['dtype']}, {memory}")
    for row in result["uneven_over_even"]:
        print(f"uneven / even {row['dtype']} {row['contender']} {row['of']}: {row['ratio']:.3f} ({row['verdict']})")
    reasons = {(row["contender"], row["training"]["reason"]) for row in found["runs"] if "reason" in row["training"]}
    for name, reason in sorted(reasons):
        print(f"{name}: {reason[:200]}")
    if found["left_out"]:
        print(f"left out for want of time: {len(found['left_out'])} runs")


def _names(found: dict[str, Any]) -> list[str]:
    """All contenders; older results have none that only chooses."""
    groups = found["contenders"]
    return [*groups["baselines"], *groups["ours"], *groups.get("chosen", ())]


def _shown(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "-"
    training = rows[0]["training"]
    if training["outcome"] != Outcome.OK:
        forward = "forward ok" if rows[0]["forward"]["outcome"] == Outcome.OK else ""
        return forward or str(training["outcome"])[:15]
    rates = [row["training"]["flops_per_second"] for row in rows if "flops_per_second" in row["training"]]
    return f"{statistics.mean(rates) / 1e12:.1f}" if rates else "ok"


def _key(cell: Cell, contender: str) -> dict[str, Any]:
    key = {"case": cell.case.name, "dtype": cell.dtype.value, "limit_bytes": cell.limit_bytes}
    return key | {"contender": contender}


def _row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["case"], row["dtype"], row["limit_bytes"], row["contender"]


def _describe(case: Case) -> dict[str, Any]:
    return {"counts": case.counts, "k": case.k, "n": case.n, "rows": sum(case.counts), "shrink": case.shrink}


if __name__ == "__main__":
    sys.exit(main())
