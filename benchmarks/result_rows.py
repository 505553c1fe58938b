"""Rows of the tables beside the raw results that take more than a path; result_tables.yaml names these functions."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

from benchmarks import trainer_contenders
from benchmarks.commands.sharded import LENGTH
from benchmarks.result_tables import RESULTS, Row, load
from bexp.explorer.records.event import EventCode

CHECK = re.compile(r"composed\s+step ([+-][\d.]+)%,\s+composed\s+peak ([+-][\d.]+)%")
WITHIN = 0.98
CONTENDERS = ("unchanged", "compiled", "liger", "library_loss", "stock", trainer_contenders.EXPERTS, "recommended")
EARLIER = {"unchanged": "sweep", "compiled": "compiled_sweep", "stock": "stock", "recommended": "recommended"}
"""The contenders of rows of one run each, and their names there."""
HOW = {"gradient_checkpointing": "checkpointed", "torch_compile": "compiled"}
OUT_OF_MEMORY = "out of memory"
UNSUPPORTED = ("LookupError", "SettingsError")
"""Errors whose messages say what a model or a machine lacks."""
SHOWN_BOUND = 0.3
"""From this share of a layer's time on, the bytes of the experts' matrices are shown as its bound."""


def trainers(result: Row) -> Iterable[Row]:
    """Return each exploration with what its contenders reached."""
    for row in result["models"]:
        if "exploration" not in row or not row.get("rounds", True):
            continue
        rounds = row.get("rounds") or [
            {name: run for name, of in EARLIER.items() if (run := trainer_contenders.best_of(row.get(of, [])))}
        ]
        reached = {name: _reached(rounds, row.get("sizes", {}), name) for name in CONTENDERS}
        over = {name: value for name in CONTENDERS if (value := trainer_contenders.gain(rounds, name)) is not None}
        document = row["exploration"]["document"] or {}
        accumulated = rounds[0].get("unchanged", {}).get("batch_size")
        answer = document.get("recommendation") or {}
        peaks = [run["peak_bytes"] for made in rounds if (run := made.get("recommended", {})).get("peak_bytes")]
        composed = answer.get("measured_peak_bytes")
        yield (
            row
            | reached
            | {
                "over": over,
                "answer": answer,
                "peak": f"{max(peaks) / composed - 1:+.1%}" if peaks and composed else "-",
                "explored": document.get("job", {}).get("created_at", "-")[:10],
                "turns": len(rounds),
                "card": rounds[0].get("recommended", {}).get("device_name"),
                "batch": row.get("batch_size") or accumulated or "one micro-batch",
            }
        )


def _reached(rounds: list[Row], sizes: Row, name: str) -> Row:
    """Return the text of a contender's cell: its median and spread, or why it did not run."""
    runs = [made[name] for made in rounds if name in made]
    ran = [run for run in runs if "tokens_per_second" in run]
    if not ran:
        failed = [run for run in [*runs, *sizes.get(name, [])] if "error" in run]
        said = [run["message"] if run["error"] in UNSUPPORTED else run["error"] for run in failed]
        return {"text": said[-1]} if said else {}
    speeds = [run["tokens_per_second"] for run in ran]
    median = statistics.median(speeds)
    how = [f"m={ran[0]['micro_batch_size']}", *(text for key, text in HOW.items() if ran[0].get(key))]
    if name == trainer_contenders.EXPERTS:
        how.append(ran[0]["candidate"]["expert_backend"])
    if (execution := ran[0].get("candidate", {}).get("execution") or "eager") != "eager":
        how.append(execution)
    spread = f" (spread {(max(speeds) - min(speeds)) / median:.1%})" if len(ran) > 1 else ""
    peaks = [run["peak_reserved_bytes"] for run in ran if run.get("peak_reserved_bytes")]
    memory = f", {max(peaks) / 2**30:.1f} GiB" if peaks else ""
    return {"text": f"{', '.join(how)}: {median / 1000:.1f}k tokens/s{spread}{memory}"}


def other_experts(result: Row) -> Iterable[Row]:
    """Return the best run of each other implementation of the experts, or why there is none."""
    for row in result["models"]:
        for name, runs in row["sizes"].items():
            if trainer_contenders.kind_of(name) != name:
                best = trainer_contenders.best_of(runs)
                reached = {} if best is None else {"best": best}
                answers = [made["recommended"].get("tokens_per_second") for made in row.get("rounds", [])]
                if best is not None and answers and all(answers):
                    reached["over"] = statistics.median(answers) / best["tokens_per_second"]
                message = runs[-1].get("message", "")
                within = re.search(r"got (\w+Error)\((['\"])(.*?)\2\)", message)  # what the compiler passes on
                said = within.group(1, 3) if within else (runs[-1].get("error", ""), *message.splitlines()[:1])
                failed = None if best else " ".join(said)[:160]
                yield row | {"experts": name.partition(" ")[2], "failed": failed} | reached


def default_answers(result: Row) -> Iterable[Row]:
    """Return each answer with the seconds of its trials, and the largest errors of composed steps and peaks.

    The errors are those without and with CUDA graphs. Without a whole model of the kind there is a dash.
    """
    for run in result["runs"]:
        checks = [(line, found) for line in run["lines"] if (found := CHECK.search(line))]
        errors = {}
        for name, has_graphs in (("plain", False), ("graphs", True)):
            errors[name] = largest_errors([check for line, check in checks if ("graph" in line) is has_graphs])
        spent = Counter[str]()
        for trial in run["trials"]:
            spent[trial["kind"]] += trial["seconds"]
        yield run | {"errors": errors, "spent": spent}


def largest_errors(checks: list[re.Match[str]]) -> str:
    """Return the largest errors of composed steps and peaks."""
    largest = [max(values, key=abs) for values in zip(*(map(float, check.groups()) for check in checks), strict=True)]
    return "{:+.1f}%, {:+.1f}%".format(*largest) if largest else "-"


def checkpointed(result: Row) -> Iterable[Row]:
    """Return each run with gradient checkpointing beside the fastest without, both of the unchanged Trainer."""
    for row in result["models"]:
        runs = [run for run in row["sizes"]["unchanged"] if "tokens_per_second" in run]
        plain = max((r for r in runs if not r.get("gradient_checkpointing")), key=itemgetter("tokens_per_second"))
        for run in runs:
            if run.get("gradient_checkpointing"):
                change = run["tokens_per_second"] / plain["tokens_per_second"] - 1
                yield {"model": row["model"], "plain": plain, "checkpointed": run, "change": change}


def tuned(result: Row) -> Iterable[Row]:
    """Return each training command with its answer, and what a sweep of the same command reached."""
    for name, row in result["commands"].items():
        runs = [run for made in row["sweep"] for run in made]
        sizes: dict[int, list[Row]] = {}
        for run in runs:
            sizes.setdefault(run["micro_batch_size"], []).append(run)
        fits = {size: made for size, made in sizes.items() if not any("failed" in run for run in made)}
        speeds = {size: statistics.median(run["samples_per_second"] for run in made) for size, made in fits.items()}
        told = [f"{size}: {speeds[size]:.1f}" if size in fits else f"{size}: {OUT_OF_MEMORY}" for size in sorted(sizes)]
        answer, number = row["tune"]["micro_batch_size"], len(row["tune"]["starts"])
        yield row | {
            "name": name,
            "starts": number,
            "sweep": "; ".join(told),
            "of_best": speeds[answer] / max(speeds.values()),
            "beyond": row["tune"]["seconds"] - number * row["start_seconds"],
            "longest": f"{row['longest']['peak_bytes'] / 2**30:.1f} GiB" if "longest" in row else "all are alike",
        }


def answer_checks(result: Row) -> Iterable[Row]:
    """Return the whole models of each answer, in the order in which they ran."""
    for run in result["runs"]:
        for number, check in enumerate(run["checks"], 1):
            yield check | {"name": run["name"], "number": number, "commit": run["commit"]}


def sharded(result: Row) -> Iterable[Row]:
    """Return each training command over several devices with its answer, and what a sweep of it reached."""
    for name, row in result["runs"].items():
        runs = {run["micro_batch_size"]: run for run in row["sweep"]}
        speeds = {size: run["samples_per_second"] for size, run in runs.items() if "samples_per_second" in run}
        tune, own = row["tune"], runs[row["tune"]["micro_batch_size"]]
        promised = tune["tokens_per_second"] / (LENGTH if tune["counts_tokens"] else 1)
        yield row | {
            "name": name,
            "sweep": "; ".join(f"{size}: {speed:.1f}" for size, speed in sorted(speeds.items())),
            "of_best": own["samples_per_second"] / max(speeds.values()),
            "speed": own["samples_per_second"] / promised,
            "peak": own["peak_bytes"] / tune["peak_bytes"],
        }


def published(result: Row) -> Iterable[Row]:
    """Return each published input with what was promised for it, and what its trainer then ran."""
    kept = {True: "as promised", False: "otherwise", None: "-"}
    for name, row in result["inputs"].items():
        promise, agreement = row["promise"], row["agreement"]
        rounds = row.get("rounds") or [row["observed"]]
        yield row | {
            "name": name,
            "own": _sizes(row["own"]) if "own" in row else "-",
            "answer": _sizes(rounds[0]),
            "promised": f"{promise['rate']:,.0f} {promise['unit']}/s, {promise['peak_bytes'] / 2**30:.1f} GiB",
            "runs": len(rounds),
            "speed": agreement.get("speed_of_promised_for_its_widths", agreement["speed_of_promised"]),
            **{each: kept[agreement[each]] for each in ("batch", "format", "parameters", "weights")},
        }


def _sizes(observed: Row) -> str:
    return f"{observed['per_device_train_batch_size']} x {observed['gradient_accumulation_steps']}"


def trainer_summary(result: Row) -> Iterable[Row]:
    """Return figures over the explorations: whole models as their logs name them, the rest of those of the defaults."""
    default = [row for row in trainers(result) if not row["fields"]]
    within = sum(row["over"].get("unchanged", 0.0) >= WITHIN for row in default)
    figure = f"{within} of {len(default)} models"
    yield {"what": "at least 0.98 of the Trainer's own best, eager code", "figure": figure}
    lines = [line.strip() for row in trainers(result) for line in row["exploration"]["log"] if "BEXP203" in line]
    errors = [[abs(float(error)) for error in pair] for pair in CHECK.findall(" ".join(lines))]
    for what, values in zip(("step", "peak"), zip(*errors, strict=True), strict=True):
        figure = f"median {statistics.median(values):.1f}%, max {max(values):.1f}% over {len(values)}"
        yield {"what": f"composed {what} against the whole model", "figure": figure}
    seconds = [took for row in default if (took := row["exploration"]["wall_seconds"]) is not None]
    figure = f"median {statistics.median(seconds):.0f} s, longest {max(seconds):.0f} s over {len(seconds)} models"
    yield {"what": "submit to final answer, eager code, the service's start included", "figure": figure}


def set_by_hand(result: Row) -> Iterable[Row]:
    """Return runs of the Trainer with settings that no exploration chose."""
    for each in result["set_by_hand"]:
        for run in each["runs"]:
            settings = run.get("settings", {})
            own = "the Trainer's `torch_compile`" if run.get("torch_compile") else settings.get("execution") or "eager"
            loss = settings.get("loss", "library")
            yield {
                **run,
                "model": each["model"],
                "loss": loss,
                "experts": settings.get("expert_backend"),
                "execution": own,
            }


def compositions(result: Row) -> Iterable[Row]:
    """Return micro-steps with the errors of their sums."""
    for row in result["compositions"]:
        time = row["composed_seconds"] / row["whole_seconds"] - 1
        yield {**row, "time": time, "activations": row["composed_activation_bytes"] / row["whole_activation_bytes"] - 1}


def by_table(result: Row) -> Iterable[Row]:
    """Return what our search came to, by table."""
    for name, summary in result["summary"]["tables"].items():
        yield {"name": name, **summary["bexp"], "table": result["tables"][name]}


def explorations(result: Row) -> Iterable[Row]:
    """Return each run with its recommendation and timings; one without whole models has no final answer."""
    for run in result["runs"]:
        final = run["submit_to_final_seconds"] if run["request"]["verify"] else None
        recommendation, timings = run["answer"]["variants"][0]["recommendation"], run["overheads"]["timings"]
        moments = zip(run["lines"], run.get("line_seconds") or (), strict=False)
        eager = next((seconds for line, seconds in moments if line.startswith(f"BEXP{int(EventCode.EAGER)}")), None)
        checks = [found for line in run["lines"] if (found := CHECK.search(line))]
        errors = {"errors": largest_errors(checks)} if checks else {}
        yield {
            "comparisons": {},
            **run,
            "eager": eager,
            "final": final,
            "found": recommendation,
            "t": timings,
            **errors,
        }


def checked(result: Row) -> Iterable[Row]:
    """Return the rows that ran as whole models, with the error of the composed step and peak."""
    for row in result["rows"]:
        if row["check"]:
            step, peak = row["check"]["step_error"], row["check"]["peak_error"]
            yield {**row, "step": step, "peak": peak, "device_step": None if row["host_bound"] else step}


def layers(result: Row) -> Iterable[Row]:
    """Return the timed rows, by model and micro-batch."""
    rows = [row for row in result["rows"] if "relative_to_dense" in row]
    return sorted(rows, key=lambda row: (row["num_experts"] or 0, row["top_k"], row["micro_batch_size"]))


def near_bound(result: Row) -> Iterable[Row]:
    """Return CUDA graphs of layers, with the bound's share of their time by the clock."""
    for row in layers(result):
        share = (row["bound_seconds"] or 0.0) / row["seconds"]
        if share > SHOWN_BOUND and row["backend"].endswith("graph") and not row["backend"].startswith("dense"):
            yield {**row, "share": share}


def expert_modes(result: Row) -> Iterable[Row]:
    """Return a row a mode."""
    return ({**row, "mode": mode, **figures} for row in result["rows"] for mode, figures in row["modes"].items())


def tiling(result: Row) -> Iterable[Row]:
    """Return MoE models relative to dense, by the limit of memory."""
    for row in result["rows"]:
        relative = row["relative_to_dense"]
        for limit in dict.fromkeys(key.partition("/")[0] for key in relative if row["num_experts"] is not None):
            yield {
                **row,
                "limit": limit,
                **{of: relative.get(f"{limit}/{of}") for of in ("plain", "tiled", "explored")},
            }


def tiled(result: Row) -> Iterable[Row]:
    """Return how many of the best candidates tile."""
    best = [
        candidate_row
        for row in result["rows"]
        for key, candidate_row in row["best"].items()
        if row["num_experts"] is not None and key.endswith(("tiled", "explored"))
    ]
    yield {"tiled": sum(bool(candidate_row["candidate"].get("bta_tile")) for candidate_row in best), "all": len(best)}


def layouts(result: Row) -> Iterable[Row]:
    """Return attention over several devices, by layout and implementation."""
    for cell in result["cells"]:
        yield from ({**cell, "name": name, **run} for name, run in cell["timed"].items() if name != "alone")


def steps(result: Row) -> Iterable[Row]:
    """Return whole steps by layout, marked where the search chose it."""
    for cell in result["cells"]:
        chosen = cell["choice"]["chosen"]
        for row in cell["layouts"]:
            mark = ", chosen" if all(chosen[key] == row[key] for key in ("size", "layout")) else ""
            over = "alone" if row["speed_over_ring"] is None else f"{row['speed_over_ring']:.2f}x"
            yield {**cell, **row, "over": over + mark}


def _by_commit(result: Row) -> Iterable[tuple[tuple[str, str], list[Row]]]:
    """Return the rounds of a result by commit and database, and all of them last."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in result["rounds"]:
        groups.setdefault((row["commit"], row["database"]), []).append(row)
    return [*groups.items(), (("all", "both"), list(result["rounds"]))]


def chaos(result: Row) -> Iterable[Row]:
    """Return campaigns of random faults, those of one commit and database together, and the sum of all."""
    for (commit, database), rows in _by_commit(result):
        struck: Counter[str] = Counter()
        for row in rows:
            struck.update({kind: number for kind, number in row["faults"].items() if kind != "failpoints"})
            for name, number in row["failpoints"].items():
                edge, action = name.split()
                struck.update({f"edge {action}": number, f"at {edge.split(':')[1]}": number, f"passed {edge}": number})
        at_work = sum(row["faults_during_jobs"] + row["faults_during_calls"] for row in rows)
        names = ("seconds", "num_faults", "jobs", "measured_jobs")
        sums: dict[str, Any] = {name: sum(row.get(name, 0) for row in rows) for name in names}
        yield {
            "commit": commit,
            "database": database,
            "broken": sum(len(row["violations"]) for row in rows),
            "calls": sum(sum(row["calls"].values()) for row in rows),
            "killed": struck["worker_kill"] + struck["api_kill"] + struck["edge kill"],
            "frozen": struck["worker_freeze_past_lease"] + struck["edge freeze"],
            "lost": struck["edge lose"],
            "ended": struck["worker_end"],
            "outages": struck["database_lock"] + struck["database_kill"],
            "places": ", ".join(f"{struck[f'at {place}']:,}" for place in ("before", "inside", "after")),
            "edges": f"{sum(name.startswith('passed') for name in struck)} of {max(row['edges'] for row in rows)}",
            "at_work": at_work / max(1, sums["num_faults"]),
            **sums,
        }


def fuzz(result: Row) -> Iterable[Row]:
    """Return fuzzed requests, those of one commit and database together, and the sum; of times, the worst round's."""
    worst = ("median_seconds", "p99_9_seconds", "slowest_seconds", "memory_growth_bytes")
    for (commit, database), rows in _by_commit(result):
        statuses: Counter[str] = sum((Counter(row["statuses"]) for row in rows), Counter())
        requests = sum(row["requests"] for row in rows)
        yield {
            "commit": commit,
            "database": database,
            "rounds": len(rows),
            "requests": requests,
            "accepted": sum(row["accepted_share"] * row["requests"] for row in rows) / requests,
            "unavailable": statuses["503"],
            "requests_a_second": requests / sum(row["seconds"] for row in rows),
            "broken": sum(row["num_violations"] for row in rows),
            **{name: max(row[name] for row in rows) for name in worst},
        }


def mutants(_: Row, pattern: str) -> Iterable[Row]:
    """Return how many sampled changes of each folder the tests noticed, and the sum. Those of lines taken out count."""
    counts: dict[str, Counter[str]] = {}
    for path in sorted(RESULTS.glob(f"{pattern}.json")):
        for mutant in load(path.stem)["mutants"]:
            first, second, *_ = mutant["path"].split("/")
            for name in (first if first in {"api", "storage"} else f"{first}/{second}", "all"):
                counts.setdefault(name, Counter())[mutant["outcome"]] += 1
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        killed, judged = counts[name]["killed"] + counts[name]["timeout"], counts[name].total()
        yield {"name": name, "judged": judged, "killed": killed, "share": killed / judged}


def several(_: Row, pattern: str) -> Iterable[Row]:
    """Return the results whose names fit."""
    return ({"result": path.stem, **load(path.stem)} for path in sorted(RESULTS.glob(f"{pattern}.json")))


def gpu_faults(result: Row) -> Iterable[Row]:
    """Return how often each fault struck, and their sum."""
    struck: Counter[str] = Counter(result["struck"])
    struck["together"] = struck.total()
    return ({"kind": kind.replace("_", " "), "struck": number} for kind, number in struck.items())


def variable(result: Row, dtype: str) -> Iterator[Row]:
    """Yield a report's cases in a number format, with what a cell of the table says."""
    for row in result["rows"]:
        if row["dtype"] != dtype or row["outcome"] == "unsupported":
            continue
        if "seconds" in row:
            yield row | {"text": f"{row['flops_per_second'] / 1e12:.0f}, {row['peak_bytes'] / 2**30:.1f} GiB"}
        else:
            yield {"load": "", **row, "text": row["outcome"].replace("_", " ")}


def variable_outcomes(result: Row) -> Iterator[Row]:
    """Yield what became of the cases on each expert kernel that serves some."""
    for name, each in result["summary"]["contenders"].items():
        outcomes = each["outcomes"]
        supported = each["cells"] - outcomes.get("unsupported", 0)
        if not supported:
            continue
        errors = ", ".join(f"{dtype} {error:.0e}" for dtype, error in each["largest_error"].items())
        yield each | {
            "name": name,
            "right": outcomes.get("ok", 0),
            "supported": supported,
            "out_of_memory": outcomes.get("out_of_memory", 0),
            "failed": sum(outcomes.get(outcome, 0) for outcome in ("wrong", "crashed", "timed_out")),
            "errors": errors,
        }


def expert_layers(result: Row) -> Iterator[Row]:
    """Yield the layers that were timed, with what a cell of the table says."""
    for row in result["rows"]:
        if "seconds" in row:
            seconds, device = row["seconds"] * 1e3, row["device_seconds"] * 1e3
            yield row | {"text": f"{seconds:.2f} ms ({device:.2f}), {row['peak_bytes'] / 2**30:.1f} GiB"}


def expert_gains(result: Row, other: str) -> Iterator[Row]:
    """Yield ours over the best other contender, in the run of two in which the gain is smaller; then all layers."""
    runs = [each["summary"]["shapes"] for each in (result, load(other))]
    found: dict[str, list[Row]] = {"seconds": [], "device_seconds": []}
    for cells in zip(*runs, strict=True):
        layer, same = ("E={num_experts} top_k={top_k} T={num_tokens} {load}".format(**cell) for cell in cells)
        assert layer == same, "both runs have the same layers"
        for clock, gains in found.items():
            gains.append(min((cell[clock] for cell in cells), key=itemgetter("ratio")))
        texts = {clock: "{ratio:.2f}x of {best_other} ({ours})".format(**gains[-1]) for clock, gains in found.items()}
        yield {"layer": layer, "peak_ratio": found["seconds"][-1]["peak_ratio"], **texts}
    for layer, of in (("geometric mean", statistics.geometric_mean), ("least", min)):
        ratios = {clock: [gain["ratio"] for gain in gains] for clock, gains in found.items()}
        yield {"layer": layer, **{clock: f"{of(each):.2f}x" for clock, each in ratios.items()}}
    level = {
        clock: sum(gain["ratio"] * (1 + 2 * gain["relative_error"]) >= 1 for gain in gains)
        for clock, gains in found.items()
    }
    yield {"layer": "level or better", **{clock: f"{number} of {len(found[clock])}" for clock, number in level.items()}}
