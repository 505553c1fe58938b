"""Whether the attention back end that the explorer picks is the fastest, when all are timed again independently.

    python -m benchmarks.attention_choice --out results/NAME.json [--quick] [--seconds S]

All cells run causal attention in bfloat16, forward and backward, with 32 heads and the same number of tokens. For each
sequence length, head size and number of query groups, `explore` runs on a model that is mostly attention, and the back
end is its only choice. Its trials are those of any exploration: the same profiler process, timer and budget. Components
that do not depend on attention (embedding, FFN, head, optimizer) are measured once per width.

After the profiler has ended, every back end is timed again in this process: the whole block, by which the explorer
chooses, and attention alone. The result is the time of the chosen back end divided by the time of the fastest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_timing import Shape, block_pass, core_pass, time_back_ends
from benchmarks.environment import describe_environment, write_results
from bexp.explorer.cost_model.components import Component, ComponentKind
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome
from bexp.explorer.records.trial import Measure, TrialPlan
from bexp.explorer.search.explore import explore
from bexp.explorer.spec.hardware import DeviceReport
from bexp.explorer.spec.model import ModelSpec
from bexp.explorer.spec.parts import ExploredModel
from bexp.explorer.spec.request import ExplorationRequest
from bexp.workers.process.profiler import Profiler

SEQ_LENGTHS = (8192, 512, 32768, 2048, 16384, 1024, 4096)
"""The order makes sure that a run that is cut short has both short and long ones."""
QUICK_SEQ_LENGTHS = (512, 4096, 32768)
HEAD_SIZES = (128, 64)
TOKENS, NUM_HEADS = 32768, 32
NUM_LAYERS, NARROW = 4, 128
"""Few layers, and an FFN and a vocabulary of this size, so that a step is attention and little else."""
WITHIN = 1.01
SECONDS, QUICK_SECONDS = 150.0, 60.0
PICKING_SHARE = 0.6
"""The share of the time after which no further exploration starts."""
LOCK_SECONDS, TRIAL_SECONDS = 60.0, 30.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape; `query_groups` equal to the heads is multi-head attention, 1 multi-query."""

    seq_length: int
    head_size: int
    query_groups: int
    num_heads: int
    tokens: int

    @property
    def kind(self) -> str:
        """MHA, GQA or MQA."""
        return "MHA" if self.query_groups == self.num_heads else "MQA" if self.query_groups == 1 else "GQA"

    @property
    def flops(self) -> int:
        """FLOPs of causal attention, forward and backward: two and five products of half a square."""
        return 7 * self.tokens * self.seq_length * self.num_heads * self.head_size

    def shape(self) -> Shape:
        """A request in which only the attention back end varies."""
        model = ModelSpec(
            name="attention",
            num_layers=NUM_LAYERS,
            hidden_size=self.num_heads * self.head_size,
            ffn_hidden_size=NARROW,
            num_attention_heads=self.num_heads,
            num_query_groups=self.query_groups,
            vocab_size=NARROW,
            seq_length=self.seq_length,
        )
        micro_batch_size = max(1, self.tokens // self.seq_length)
        request = ExplorationRequest.model_validate(
            {
                "model": model,
                "micro_batch_size": micro_batch_size,
                "bta": {"enable": False},
                "recompute": ["none"],
                "budget": {"trial_timeout_seconds": TRIAL_SECONDS},
                "verify": False,
            }
        )
        return Shape(model, request, micro_batch_size)


def main(arguments: list[str] | None = None) -> int:
    """Explore, time again, print and write one JSON file; 1 if nothing could be compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="fewer shapes, within 60 s")
    parser.add_argument("--seconds", type=float, help=f"start nothing after so long (default {SECONDS:g})")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seq-lengths", type=int, nargs="+")
    parser.add_argument("--head-sizes", type=int, nargs="+")
    parser.add_argument("--num-heads", type=int, default=NUM_HEADS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args(arguments)
    started, seconds = time.monotonic(), options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    found: dict[str, Any] = {
        "environment": describe_environment(),
        "tokens": options.tokens,
        "num_heads": options.num_heads,
        "within": WITHIN,
        "cells": [],
        "left_out": [],
    }
    picked: list[tuple[Cell, dict[str, Any]]] = []
    with Profiler(options.device, lock_timeout_seconds=LOCK_SECONDS) as profiler:
        found["hardware"] = profiler.hardware().model_dump(mode="json")
        measure = SharedMeasure(profiler.measure)
        for cell in cells(options):
            if time.monotonic() > started + PICKING_SHARE * seconds:
                found["left_out"].append(describe(cell) | {"what": "exploration"})
                continue
            shape = cell.shape()
            picked.append((cell, pick(shape, profiler.begin(shape.request), measure)))
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for index, (cell, choice) in enumerate(picked):
        left = started + seconds - time.monotonic()
        if left <= 0:
            found["left_out"].append(describe(cell) | {"what": "timing"})
            continue
        share = left / (len(picked) - index) / 2
        shape, names = cell.shape(), tuple(choice["back_ends"])
        timed = {
            "block": time_back_ends(block_pass, shape, names, device, share),
            "core": time_back_ends(core_pass, shape, names, device, share),
        }
        found["cells"].append(describe(cell) | choice | {"timed": timed} | verdict(choice["picked"], timed))
        write_results(options.out, found | {"summary": summary(found["cells"])})
    found["summary"] = summary(found["cells"])
    write_results(options.out, found)
    print_table(found)
    return 0 if found["summary"]["cells"] else 1


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """What is compared."""
    heads = options.num_heads
    for seq_length in options.seq_lengths or (QUICK_SEQ_LENGTHS if options.quick else SEQ_LENGTHS):
        for head_size in options.head_sizes or (HEAD_SIZES[:1] if options.quick else HEAD_SIZES):
            for query_groups in dict.fromkeys((heads, max(1, heads // 4), 1)):
                yield Cell(seq_length, head_size, query_groups, heads, options.tokens)


class SharedMeasure:
    """Measures what a plan asks for. Components that do not depend on attention are measured once per width.

    Every cell has the same number of tokens and the same model around its attention, so those parts are the same.
    """

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._known: dict[tuple[ComponentKind, int, int], ComponentMeasurement] = {}

    def __call__(self, plan: TrialPlan) -> Measurement:
        """Run a plan as a profiler's `measure` does."""
        new = tuple(component for component in plan.components if self._key(plan.model, component) not in self._known)
        if new:
            found = self._measure(plan.model_copy(update={"components": new}))
            if found.outcome is not Outcome.OK:
                return found
        else:
            found = Measurement(candidate=plan.candidate, outcome=Outcome.OK)
        measured = {m.component: m for m in found.components}
        for component, measurement in measured.items():
            if component.kind is not ComponentKind.ATTENTION:
                self._known[self._key(plan.model, component)] = measurement
        components = [
            measured.get(component)
            or self._known[self._key(plan.model, component)].model_copy(update={"component": component})
            for component in plan.components
        ]
        return found.model_copy(update={"components": tuple(components)})

    @staticmethod
    def _key(model: ExploredModel, component: Component) -> tuple[ComponentKind, int, int]:
        """Of the parts around attention; only the optimizer sees how many parameters attention has."""
        assert isinstance(model, ModelSpec), "reference layers"
        groups = model.query_groups if component.kind is ComponentKind.OPTIMIZER else 0
        return component.kind, model.hidden_size, groups


def pick(shape: Shape, report: DeviceReport, measure: Measure) -> dict[str, Any]:
    """Return what `explore` recommends, and its trials."""
    answer, trials = None, []
    for step in explore(shape.request, report, measure):
        answer = step.answer or answer
        if step.trial is not None:
            measured = step.trial.measurement
            attention = [m for m in measured.components if m.component.kind is ComponentKind.ATTENTION]
            trials.append(
                {
                    "back_end": measured.candidate.attention_backend,
                    "outcome": measured.outcome.value,
                    "reason": measured.reason,
                    "attention": attention[0].model_dump(mode="json") if attention else None,
                    "seconds": step.trial.seconds,
                }
            )
    recommendation = answer.recommendation if answer else None
    return {
        "picked": recommendation.candidate.attention_backend if recommendation else None,
        "confidence": recommendation.confidence if recommendation else None,
        "back_ends": [support.name for support in report.attention_backends],
        "trials": trials,
    }


def verdict(picked: str | None, timed: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the fastest by the independent timing, and the time of the chosen one over it; null if it has none."""
    result: dict[str, Any] = {}
    for of, runs in timed.items():
        seconds = {name: run["seconds"] for name, run in runs.items() if run["outcome"] == Outcome.OK}
        best = min(seconds, key=lambda name: seconds[name]) if seconds else None
        ratio = seconds[picked] / seconds[best] if best is not None and picked in seconds else None
        result[of] = {"best": best, "ratio": ratio, "within": ratio is not None and ratio <= WITHIN}
    return {"verdict": result}


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the share of choices within 1% of the fastest, and the worst. A choice without a time is not within."""
    result: dict[str, Any] = {"cells": len(found)}
    for of in ("block", "core"):
        verdicts = [cell["verdict"][of] for cell in found]
        ratios = [found["ratio"] for found in verdicts if found["ratio"] is not None]
        result[of] = {
            "within": sum(found["within"] for found in verdicts),
            "share_within": statistics.mean(found["within"] for found in verdicts) if verdicts else None,
            "worst_ratio": max(ratios, default=None),
        }
    return result


def describe(cell: Cell) -> dict[str, Any]:
    """Its sizes, as JSON."""
    return {
        "seq_length": cell.seq_length,
        "head_size": cell.head_size,
        "query_groups": cell.query_groups,
        "kind": cell.kind,
        "micro_batch_size": max(1, cell.tokens // cell.seq_length),
        "flops": cell.flops,
    }


def print_table(found: dict[str, Any]) -> None:
    """Print milliseconds of a block by back end, the choice, and how far it is from the fastest."""
    names = tuple(dict.fromkeys(name for cell in found["cells"] for name in cell["back_ends"]))
    print("attention block, forward and backward, ms (attention alone, TFLOP/s); timed independently")
    print(f"{'S':>6} {'D':>4} {'kind':>4} " + "".join(f"{name:>20}" for name in names) + "    picked  block   core")
    for cell in sorted(found["cells"], key=lambda cell: (cell["seq_length"], cell["head_size"], -cell["query_groups"])):
        shown = "".join(f"{_shown(cell, name):>20}" for name in names)
        ratios = [cell["verdict"][of]["ratio"] for of in ("block", "core")]
        print(
            f"{cell['seq_length']:>6} {cell['head_size']:>4} {cell['kind']:>4} {shown}{cell['picked'] or '-':>10}"
            + "".join(f"{'-':>7}" if ratio is None else f"{ratio:7.3f}" for ratio in ratios)
        )
    print(found["summary"])
    if found["left_out"]:
        print(f"left out for want of time: {len(found['left_out'])} shapes")


def _shown(cell: dict[str, Any], name: str) -> str:
    block, core = (cell["timed"][of].get(name, {"outcome": "-"}) for of in ("block", "core"))
    if block["outcome"] != Outcome.OK:
        return str(block["outcome"])
    rate = f" ({cell['flops'] / core['seconds'] / 1e12:.0f})" if core["outcome"] == Outcome.OK else ""
    return f"{1e3 * block['seconds']:.2f}{rate}"


if __name__ == "__main__":
    sys.exit(main())
