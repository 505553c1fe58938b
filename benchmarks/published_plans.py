"""Plans against what others published of the same meshes, row by row.

    python -m benchmarks.published_plans --out benchmarks/results/h100-published-plans.json --device cuda:0

`published_plans.json` states the mesh, the micro-batch and the throughput of each row, and where it was published. The
blocks of one device are measured as a plan measures them, and the step is composed as a plan composes it. `as_run` is
what the published run had in place of a plan's defaults, such as another attention kernel, or compiled layers. A row is
predicted with the defaults first, then with one of these after the other: what each changes is a cause of the first
prediction's error, measured. `unstated` is a setting that the published run may have had instead, because its source
does not say; the prediction with it stands beside the row's. Nothing is fitted to the rows: where a framework hides an
exchange or rounds a policy differently, the notes say so, and the difference is part of the error. Whether a row would
fit this device is not checked.

Rows of one model share their blocks. Every measured block is written at once, so that a run that was cut off goes on
where it stopped; a row that failed is tried again. With `--recompose` nothing is measured: the rows of an earlier run
are composed again from its blocks, as plans compose them now. A row that would need another block keeps its figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment, write_results
from benchmarks.kernels_digest import kernels_digest
from benchmarks.plan_prediction import RowError, predict
from bexp.explorer.formats.request import parse_request
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.trial import Measure
from bexp.explorer.spec.hardware import BackendSupport, HardwareSpec
from bexp.explorer.spec.request import ExplorationRequest
from bexp.workers.process.profiler import Profiler

PUBLISHED = Path(__file__).with_suffix(".json")


def main(arguments: list[str] | None = None) -> int:
    """Measure, compose, print and write one JSON file; fails if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--published", type=Path, default=PUBLISHED)
    parser.add_argument("--rows", nargs="+", help="names; default: all")
    parser.add_argument("--minutes", type=float, default=60.0, help="no row is begun after so many")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--recompose", action="store_true", help="compose the rows of --out again, without a device")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    table = json.loads(options.published.read_text())
    unknown = set(options.rows or ()) - {row["name"] for row in table["rows"]}
    if unknown:
        parser.error(f"no row has the name {', '.join(sorted(unknown))}")
    wanted = [row for row in table["rows"] if not options.rows or row["name"] in options.rows]
    results = read_results(options.out)
    results |= {
        name: table[name] for name in ("fabric", "card", "sources", "as_run", "left_out", "ratios", "elsewhere")
    }
    if options.recompose:
        for row in wanted:
            recompose_row(row, table, results)
        results["recomposed"] = describe_environment()["date"]
    else:
        run_rows(wanted, table, options, results)
    results["summary"] = summarize(results["rows"])
    write_results(options.out, results)
    print(json.dumps(results["summary"]))
    return int(any(results["rows"].get(row["name"], {}).keys() & {"reason", "kept"} for row in wanted))


def run_rows(
    wanted: Sequence[dict[str, Any]], table: dict[str, Any], options: argparse.Namespace, results: dict[str, Any]
) -> None:
    """Predict the rows that have no prediction yet, until the time is over."""
    end = time.monotonic() + 60 * options.minutes
    with Profiler(options.device) as profiler:
        for row in wanted:
            if time.monotonic() > end:
                print(f"the time is over before {row['name']}", flush=True)
                break
            run_row(row, table, profiler, results, lambda: write_results(options.out, results))


def read_results(path: Path) -> dict[str, Any]:
    """Return the results of an earlier run, or those of none."""
    if path.exists():
        results: dict[str, Any] = json.loads(path.read_text())
        return results
    return {"environment": describe_environment(), "hardware": None, "rows": {}, "components": []}


def run_row(
    row: dict[str, Any], table: dict[str, Any], profiler: Profiler, results: dict[str, Any], save: Callable[[], None]
) -> None:
    """Predict a row that has no prediction yet, or that of another run; `save` is called after every block."""
    known = results["rows"].get(row["name"], {})
    if "predicted" in known and all(known.get(name, {}) == row.get(name, {}) for name in ("as_run", "unstated")):
        return
    started = time.perf_counter()
    published = _published(row)

    def begin(of: ExplorationRequest) -> DeviceReport:
        report = profiler.begin(of)
        results["hardware"] = report.hardware.model_dump(mode="json")
        return report

    try:
        predicted = predict_as_run(row, table, begin, profiler.measure, results["components"], save)
    except RowError as refusal:
        results["rows"][row["name"]] = {**published, "reason": str(refusal)}
        print(f"{row['name']:30} {refusal}", flush=True)
    else:
        deviation = predicted["predicted"] / row["tokens_per_second"] - 1
        taken = time.perf_counter() - started
        results["rows"][row["name"]] = {**published, **predicted, "error": deviation, "seconds": taken}
        results["rows"][row["name"]]["kernels_digest"] = kernels_digest()
        print(
            f"{row['name']:30} published {row['tokens_per_second']:8.1f}, predicted {predicted['predicted']:8.1f} "
            f"({deviation:+.1%}) in {taken:.0f} s",
            flush=True,
        )
    finally:
        profiler.finish_job()
    save()


def recompose_row(row: dict[str, Any], table: dict[str, Any], results: dict[str, Any]) -> None:
    """Compose a row again from stored blocks, with the kernels of its run; if one is missing, `kept` says which."""
    recorded = results["rows"].get(row["name"], {})
    if "predicted" not in recorded:
        return

    def begin(of: ExplorationRequest) -> DeviceReport:
        return DeviceReport(
            hardware=HardwareSpec.model_validate(results["hardware"]),
            attention_backends=_named(of.attention_backends),
            expert_backends=_named(of.expert_backends),
            default_attention=recorded["kernels"]["attention"],
            default_experts=recorded["kernels"]["experts"],
        )

    kept = {name: value for name, value in recorded.items() if name != "kept"}
    try:
        predicted = predict_as_run(row, table, begin, None, results["components"], lambda: None)
    except RowError as refusal:
        results["rows"][row["name"]] = {**kept, **_published(row), "kept": str(refusal)}
        print(f"{row['name']:30} keeps its figures: {refusal}", flush=True)
        return
    error = predicted["predicted"] / row["tokens_per_second"] - 1
    results["rows"][row["name"]] = {**kept, **_published(row), **predicted, "error": error}
    print(f"{row['name']:30} error {recorded['error']:+.1%}, now {error:+.1%}", flush=True)


def predict_as_run(
    row: dict[str, Any],
    table: dict[str, Any],
    begin: Callable[[ExplorationRequest], DeviceReport],
    measure: Measure | None,
    components: list[dict[str, Any]],
    save: Callable[[], None],
) -> dict[str, Any]:
    """Return the prediction of the run, and in `causes` the tokens/s before it was like the run in all respects.

    `otherwise` has the tokens/s with each setting that the source may have meant instead, as far as its blocks are
    known.

    Raises:
        RowError: as of `predict`.
    """

    def of(asked: dict[str, Any]) -> dict[str, Any]:
        request = request_of({**row, "request": asked}, table)
        return predict(request, begin(request), measure, components, save)

    asked, causes, otherwise = dict(row["request"]), {}, {}
    prediction = of(asked)
    for name, value in row.get("as_run", {}).items():
        causes[name], asked[name] = prediction["predicted"], value
        prediction = of(asked)
    for name, value in row.get("unstated", {}).items():
        with suppress(RowError):
            otherwise[name] = of({**asked, name: value})["predicted"]
    return {**prediction, "causes": causes, "otherwise": otherwise}


def _named(backends: Sequence[str] | None) -> tuple[BackendSupport, ...]:
    return tuple(BackendSupport(name=name, usable=True) for name in backends or ())


def _published(row: dict[str, Any]) -> dict[str, Any]:
    stated = {key: row.get(key, {}) for key in ("model", "source", "notes", "request", "as_run", "unstated")}
    return {**stated, "published": row["tokens_per_second"]}


def request_of(row: dict[str, Any], table: dict[str, Any]) -> ExplorationRequest:
    """Return a plan that admits the row's mesh alone."""
    model = {"name": row["model"], **table["models"][row["model"]]}
    return parse_request({"model": model, "fabric": table["fabric"], **row["request"]})


def summarize(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the errors over all rows, and how many pairs of meshes are in the published order.

    A pair has the same model, source and number of devices, and another mesh.
    """
    done = [row for row in rows.values() if "predicted" in row]
    errors = sorted(abs(row["error"]) for row in done)
    pairs = [(a, b) for a, b in combinations(done, 2) if _is_comparable(a, b)]
    ordered = sum((a["published"] - b["published"]) * (a["predicted"] - b["predicted"]) > 0 for a, b in pairs)
    return {
        "rows": len(done),
        "failed": len(rows) - len(done),
        "median_error": statistics.median(errors) if errors else None,
        "max_error": errors[-1] if errors else None,
        "pairs": len(pairs),
        "pairs_in_order": ordered,
    }


def _is_comparable(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def values(row: dict[str, Any], names: Sequence[str]) -> list[Any]:
        return [row["request"][name] for name in names]

    same = (a["model"], a["source"]) == (b["model"], b["source"])
    same &= values(a, ["num_devices", "batch_size"]) == values(b, ["num_devices", "batch_size"])
    return same and values(a, ["parallelism"]) != values(b, ["parallelism"])


if __name__ == "__main__":
    sys.exit(main())
