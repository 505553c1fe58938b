"""The contenders of a row of `benchmarks.real_trainers`: what each of them runs, at which sizes, and who is faster."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.trainer_runs import OUT_OF_MEMORY

Run = dict[str, Any]
EXPERTS = "experts"
"""The contender that is the fastest of those with another implementation of the experts."""
OTHER_EXPERTS = (
    *("grouped_mm", "sonicmoe", "bexp_sonicmoe", "deepgemm", "bexp_deepgemm", "bexp_liger"),
    *("eager", "batched_mm"),
)
"""Implementations that are not this project's, likely ones first: the transformers library's, and with `bexp_` those of
packages that are installed here, where the library takes its kernels from a hub."""


def answered(row: Run) -> Run | None:
    """What `bexp.apply` takes from the row's answer; None if there is no answer that divides the batch."""
    recommendation = (row["exploration"]["document"] or {}).get("recommendation")
    if not recommendation:
        return None
    candidate = alternative_of(recommendation, "dividing") or recommendation["candidate"]
    size = candidate["micro_batch_size"]
    return None if row["batch_size"] % size else {"micro_batch_size": size, "candidate": candidate}


def document_of(row: Run, candidate: Run) -> Run:
    """The row's answer as it is, or with another candidate in its place."""
    document: Run = row["exploration"]["document"]
    run = answered(row)
    if run is not None and run["candidate"] == candidate:
        return document
    recommendation = {**document["recommendation"], "candidate": candidate, "alternatives": []}
    return {**document, "recommendation": recommendation}


def variants_of(row: Run) -> dict[str, list[Run]]:
    """The variants of each contender whose size is to be found, without their sizes."""
    is_eager = row.get("lengths") is not None or any(
        field in ("execution=eager", "quick=true") for field in row["fields"]
    )
    liger = {"use_liger_kernel": True}
    contenders: dict[str, list[Run]] = {"unchanged": [{}, {"gradient_checkpointing": True}], "liger": [liger]}
    if not is_eager:
        contenders["compiled"] = [{"torch_compile": True}]
        contenders["liger"].append({**liger, "torch_compile": True})
    if (run := answered(row)) is not None:
        candidate, stock = run["candidate"], {**run["candidate"], "bta_tile": None}
        if (candidate.get("expert_backend") or "").startswith("bexp_"):
            stock["expert_backend"] = stock_of(row).get("expert_backend") or "grouped_mm"
        if stock != candidate:
            contenders["stock"] = [{"candidate": stock}]
            named = {**stock_of(row), "micro_batch_size": stock["micro_batch_size"]}
            if len(named) > 1 and named != stock:  # the answer's best stock candidate has another loss or execution
                contenders["stock"].append({"candidate": named})
        if stock.get("loss") not in {None, "library"}:
            contenders["library_loss"] = [{"candidate": {**stock, "loss": "library"}}]
        if (own := candidate.get("expert_backend")) is not None:
            for name in OTHER_EXPERTS:
                if name != own:
                    contenders[f"{EXPERTS} {name}"] = [{"candidate": {**candidate, "expert_backend": name}}]
    return contenders


def kind_of(contender: str) -> str:
    """What a contender is in the rounds: all with other experts are one, and the fastest of them runs."""
    return contender.partition(" ")[0]


def fastest_rival(contender: str, row: Run) -> Run | None:
    """The fastest run of other contenders of the same kind, so far."""
    of_kind = (runs for name, runs in row["sizes"].items() if kind_of(name) == kind_of(contender) != name)
    return best_of([run for runs in of_kind for run in runs])


def of_size(variant: Run, size: int) -> Run:
    candidate = {"candidate": {**variant["candidate"], "micro_batch_size": size}} if "candidate" in variant else {}
    return {**variant, **candidate, "micro_batch_size": size}


def stock_of(row: Run) -> Run:
    """The best stock candidate that the row's answer names; empty if it names none."""
    return alternative_of(row["exploration"]["document"]["recommendation"], "stock")


def alternative_of(recommendation: Run, role: str) -> Run:
    """The candidate with a role that an answer names; empty if it names none."""
    named = (each["candidate"] for each in recommendation.get("alternatives", ()) if each["role"] == role)
    candidate: Run = next(named, {})
    return candidate


def divisors(batch_size: int) -> list[int]:
    """The sizes that a batch can be accumulated from."""
    return [size for size in range(1, batch_size + 1) if batch_size % size == 0]


def start_of(name: str, row: Run, made: Sequence[Run]) -> int | None:
    """The size at which a variant of a contender starts, given the runs of its earlier variants; None: at none.

    What saves memory starts above the best size of the unchanged Trainer.
    """
    sizes, best = divisors(row["batch_size"]), best_of(made)
    found = {contender: run["micro_batch_size"] for contender, runs in row["sizes"].items() if (run := best_of(runs))}
    recommended = (answered(row) or {"micro_batch_size": sizes[len(sizes) // 2]})["micro_batch_size"]
    if name == "unchanged":
        ran = [run["micro_batch_size"] for run in made if "tokens_per_second" in run]
        return next((size for size in sizes if size > max(ran)), None) if ran else recommended
    if made:
        return None if best is None else best["micro_batch_size"]
    if name in {"compiled", "liger"} and "unchanged" in found:
        return next((size for size in sizes if size > found["unchanged"]), found["unchanged"])
    if name == "stock" and (size := stock_of(row).get("micro_batch_size")) in sizes:
        return int(size)
    return found.get("stock", recommended)


def next_size(sizes: Sequence[int], made: Sequence[Run], start: int | None) -> int | None:
    """The next size of a variant: up while it gets faster and should fit, down while nothing fits; None at the end.

    A variant that does not compile also tries the size below its best. One that compiles does not, because that takes
    tens of seconds and the largest that fits has seldom lost 1%.
    """
    if not made:
        return start
    tried = {run["micro_batch_size"] for run in made}
    best = best_of(made)
    if best is None:
        smaller = [size for size in sizes if size < min(tried)]
        return smaller[-1] if smaller and made[-1]["error"] == OUT_OF_MEMORY else None
    at = sizes.index(best["micro_batch_size"])
    near = sizes[at + 1 : at + 2]
    if not (best.get("torch_compile") or "compile" in (best.get("candidate", {}).get("execution") or "")):
        near = [*near, *sizes[max(0, at - 1) : at]]
    return next((size for size in near if size not in tried and should_fit(best, size)), None)


def should_fit(run: Run, size: int) -> bool:
    """Whether a larger size fits, if the memory of a micro-step grows with its size. True where none was read."""
    if run.get("kept_bytes") is None:
        return True
    of_a_sequence = (run["peak_bytes"] - run["kept_bytes"]) / run["micro_batch_size"]
    return bool(run["kept_bytes"] + of_a_sequence * size <= run["device_bytes"])


def best_of(runs: Sequence[Run]) -> Run | None:
    """The fastest run that did not fail; None if all did."""
    ran = [run for run in runs if "tokens_per_second" in run]
    return max(ran, key=lambda run: run["tokens_per_second"], default=None)


def gain(rounds: Sequence[Run], contender: str) -> float | None:
    """The median over the rounds of the recommended run over a contender's; None where no round has both."""
    pairs = [(made["recommended"], made[contender]) for made in rounds if {"recommended", contender} <= made.keys()]
    gains = [
        ours["tokens_per_second"] / other["tokens_per_second"]
        for ours, other in pairs
        if "tokens_per_second" in ours and "tokens_per_second" in other
    ]
    return statistics.median(gains) if gains else None
