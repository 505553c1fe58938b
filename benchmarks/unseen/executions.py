"""What it costs to choose among executions: searches on the same unseen devices in eager code, and with a choice.

    python -m benchmarks.unseen.executions --seed-range FIRST END --out F

Each device is searched with `execution: eager` and with a choice, in three spaces: the drawn one, one of the three
smallest micro-batch sizes with a single value of everything else, and that of a model of a library
(`benchmarks.unseen.executions`), whose choice is the default of a GPU: its losses and kernels, too. The choice is with
CUDA graphs, or with all executions. Graphs have the components of eager code, so that they cost whole models alone.
Compiled code has components of its own, and each takes 4 to 20 s to compile. The cost is the device seconds of all
searches together, compilation and whole models included, as a multiple of those without the choice.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import describe_commit, describe_environment, write_results
from benchmarks.replay.calibration import CONFIDENT
from benchmarks.replay.runs import Run, search
from benchmarks.unseen.device import UnseenDevice
from benchmarks.unseen.draws import Draws
from benchmarks.unseen.kernels import Kernels
from benchmarks.unseen.models import STATE_SHARE, draw_report, draw_request
from benchmarks.unseen.truth import FEWEST_CANDIDATES, MOST_DRAWS, UnseenTruth, complete, draw_truth
from bexp.explorer.cost.components import BackEnd, BlockRecompute, Component, ComponentKind
from bexp.explorer.cost.parameters import count_layer, count_parameters
from bexp.explorer.cost.step import memory_limit
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.loss import LOSSES
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.model.model import LayerKind, ModelSpec
from bexp.explorer.model.parts import LayerPart, ModelParts, Part
from bexp.explorer.model.target import TRANSFORMERS
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import prune_space
from bexp.workers.replay.profiler import VirtualClock

ATTENTION = {"sdpa": "cudnn", "sdpa:flash": "flash", "sdpa:efficient": "efficient"}
EXPERTS = {"grouped_mm": "grouped_mm", "bexp_fused": "fused"}
"""What they are called by the library, and by `benchmarks.unseen.kernels`."""
LAYER = "DecoderLayer"
ITEM, LOGIT_BYTES, LOGIT_TRANSIENT_BYTES = 2, 4, 8
SAVED_WIDTHS = 34
"""Hidden widths that a layer keeps for each token."""
HAS_LIGER = 0.7
"""The share of models that liger has kernels for."""


def draw_library_truth(seed: int, *, quick: bool = False) -> UnseenTruth:
    """Return the device and the model of a seed; `quick` explores eager code and the library's loss alone.

    Raises:
        RuntimeError: no draw fits, which would be an error of the generator.
    """
    for attempt in range(MOST_DRAWS):
        draws = Draws(MOST_DRAWS * seed + attempt)
        drawn = draw_request(draws)
        spec = drawn.shapes
        model, report = _parts(spec), draw_report(draws, drawn)
        report = _report(draws, report, model)
        request = ExplorationRequest(
            hf_config={"model_type": "llama"},
            hf_seq_length=spec.seq_length,
            target=TRANSFORMERS,
            batch_size=drawn.batch_size,
            device_kind="cuda",
            quick=quick,
        )
        try:
            prune = prune_space(model, request, report)
        except EmptySpaceError:
            continue
        table = prune.table
        if table is None or len(prune.legal.candidates) < FEWEST_CANDIDATES:
            continue
        if table.static_bytes_C.min() > STATE_SHARE * memory_limit(request, report.hardware):
            continue
        layers = _LibraryKernels(draws, Kernels(draws, report.hardware), spec)
        truth = complete(seed, draws, request, report, prune, table, layers.seconds)
        if (truth.tokens_C > 0).any():
            return truth
    raise RuntimeError(f"no model fits its device with seed {seed}")


def _parts(spec: ModelSpec) -> ModelParts:
    kind = LayerKind.MOE if spec.moe is not None else LayerKind.DENSE
    parameters, all_parameters = count_layer(spec, kind), count_parameters(spec)
    active = parameters
    if spec.moe is not None:
        matrices = (3 if spec.gated_mlp else 2) * spec.hidden_size * spec.moe.expert_ffn_hidden_size
        active -= (spec.moe.num_experts - spec.moe.top_k) * matrices
    outside = all_parameters - spec.num_layers * parameters
    head = spec.vocab_size * spec.hidden_size
    layer = LayerPart(
        name=LAYER,
        has_experts=spec.moe is not None,
        num_parameters=parameters,
        parameter_bytes=ITEM * parameters,
        trainable_bytes=ITEM * parameters,
        flops_per_token=2.0 * active,
        flops_per_sequence=2.0 * spec.seq_length**2 * spec.num_attention_heads * spec.head_size,
        saved_bytes_per_token=SAVED_WIDTHS * spec.hidden_size,
        transient_bytes_per_token=SAVED_WIDTHS * spec.hidden_size / 2,
    )
    return ModelParts(
        target=TRANSFORMERS,
        target_version="0",
        name="unseen",
        dtype=spec.dtype,
        seq_length=spec.seq_length,
        layers=(LAYER,) * spec.num_layers,
        kinds=(layer,),
        shell=Part(
            num_parameters=outside,
            parameter_bytes=ITEM * outside,
            trainable_bytes=ITEM * outside,
            flops_per_token=2.0 * head,
            saved_bytes_per_token=LOGIT_BYTES * spec.vocab_size + 4 * ITEM * spec.hidden_size,
            transient_bytes_per_token=LOGIT_TRANSIENT_BYTES * spec.vocab_size,
        ),
        output_bytes_per_token=ITEM * spec.hidden_size,
        num_parameters=all_parameters,
        parameter_bytes=ITEM * all_parameters,
        trainable_bytes=ITEM * all_parameters,
        policies=(Recompute.NONE, *(policy for policy in Recompute if policy.layer_share > 0)),
    )


def _report(draws: Draws, report: DeviceReport, model: ModelParts) -> DeviceReport:
    has_liger = draws.happens(HAS_LIGER, "liger")
    reason = None if has_liger else "liger-kernel does not know the model type"
    experts = EXPERTS if model.has_experts else {}
    return DeviceReport(
        hardware=report.hardware,
        attention_backends=tuple(BackendSupport(name=name, usable=True) for name in ATTENTION),
        expert_backends=tuple(
            BackendSupport(name=name, usable=True, stock=not name.startswith("bexp")) for name in experts
        ),
        choices={
            "kernels": (
                BackendSupport(name="library", usable=True),
                BackendSupport(name="liger", usable=has_liger, reason=reason, stock=False, only_when_named=True),
            ),
            "execution": tuple(BackendSupport(name=execution, usable=True) for execution in Execution),
            "loss": tuple(BackendSupport(name=loss, usable=True) for loss in LOSSES),
        },
        default_attention="sdpa",
        default_experts="grouped_mm" if experts else None,
        parts=model,
    )


class _LibraryKernels:
    """Seconds of layers, shell and optimizer."""

    def __init__(self, draws: Draws, kernels: Kernels, spec: ModelSpec) -> None:
        self._draws = draws
        self._kernels = kernels
        self._spec = spec
        self._shares = {
            "": 1.0,
            "liger": draws.between(0.15, 0.6, "fused", "liger"),
            "compiled": draws.between(0.1, 0.6, "fused", "compiled"),
        }
        self._small = draws.scale_between(0.15, 1.5, "small operations")

    def seconds(self, component: Component) -> tuple[float, float]:
        """Return device and host seconds of a forward and backward pass, or of an optimizer step."""
        draws, spec = self._draws, self._spec
        if component.kind is ComponentKind.LAYER:
            return self._layer(component)
        if component.kind is ComponentKind.SHELL:
            embedding = Component(kind=ComponentKind.EMBEDDING, micro_batch_size=component.micro_batch_size)
            head = Component(kind=ComponentKind.HEAD, micro_batch_size=component.micro_batch_size)
            pairs = [self._kernels.seconds(each, spec) for each in (embedding, head)]
            loss = component.setting or "library"
            low, high = {"library": (1.0, 1.0), "chunked": (0.95, 1.12)}.get(loss, (0.6, 1.9))
            factor = draws.between(low, high, "loss", loss)
            return factor * sum(device for device, _ in pairs), sum(host for _, host in pairs)
        return self._kernels.seconds(component, spec)

    def _layer(self, component: Component) -> tuple[float, float]:
        spec, backend = self._spec, component.backend
        assert backend is not None, "a layer names its attention"
        size, tile = component.micro_batch_size, component.bta_tile
        attention = Component(
            kind=ComponentKind.ATTENTION,
            micro_batch_size=size,
            bta_tile=tile,
            backend=BackEnd(ATTENTION[backend.attention or "sdpa"]),
            num_query_groups=spec.query_groups,
        )
        experts = None if backend.experts is None else BackEnd(experts=EXPERTS[backend.experts])
        kind = ComponentKind.DENSE_FFN if experts is None else ComponentKind.MOE_FFN
        ffn = Component(kind=kind, micro_batch_size=size, backend=experts)
        pairs = [self._kernels.seconds(each, spec) for each in (attention, ffn)]
        plain = attention.model_copy(update={"backend": BackEnd("cudnn"), "bta_tile": None})
        usual = self._kernels.seconds(plain, spec)[0]
        jump = 1.0 + self._draws.between(-0.01, 0.01, "fused", backend, size)
        device = (
            sum(device for device, _ in pairs) + self._small * self._shares["".join(backend.marks)] * usual
        ) * jump
        if component.recompute is not BlockRecompute.NONE:
            device *= 4 / 3
        host = sum(host for _, host in pairs) * (0.5 if component.is_compiled else 1.0)
        return device, host


SIZES = {"drawn": None, "three sizes": 3}
"""Drawn spaces by name, with the number of their micro-batch sizes; None leaves the space as it was drawn."""
LIBRARY = "library"
CHOICES: dict[str, tuple[Execution, ...]] = {"graphs": (Execution.EAGER, Execution.GRAPH), "all": tuple(Execution)}
RUNS = [*((space, choice) for choice in CHOICES for space in SIZES), (LIBRARY, "all")]
MOST_TIMES = 1.3
"""What a choice with graphs may cost."""


@dataclass(frozen=True, slots=True)
class ExecutionRun:
    """A device's two searches in one space: seconds with whole models, and regrets, each without and with a choice.

    `gain` is how much faster the best of the choice is than the best in eager code. `first_confident` says whether the
    first confident line of the search with a choice was true; None if there was none.
    """

    seed: int
    space: str
    choice: str
    seconds: tuple[float, float]
    check_seconds: tuple[float, float]
    regret: tuple[float, float]
    gain: float = 1.0
    first_confident: bool | None = None


def compare(seed: int, space: str, choice: str) -> ExecutionRun:
    """Search on the device of a seed without and with a choice of executions."""
    (eager, without), (all_of, chosen) = _search(seed, space, None), _search(seed, space, choice)
    return ExecutionRun(
        seed,
        space,
        choice,
        (without.seconds + without.check_seconds, chosen.seconds + chosen.check_seconds),
        (without.check_seconds, chosen.check_seconds),
        (without.regret, chosen.regret),
        all_of.best / eager.best,
        next((line.within_tolerance for line in chosen.lines if line.confidence >= CONFIDENT), None),
    )


def _search(seed: int, space: str, choice: str | None) -> tuple[UnseenTruth, Run]:
    if space == LIBRARY:
        truth = draw_library_truth(seed, quick=choice is None)
    else:
        truth = draw_truth(seed, executions=None if choice is None else CHOICES[choice], num_sizes=SIZES[space])
    clock = VirtualClock()
    return truth, search(truth, seed, UnseenDevice(truth, seed, clock), clock)


def summarize(runs: Sequence[ExecutionRun]) -> dict[str, Any]:
    by_space = {}
    for choice, space in dict.fromkeys((run.choice, run.space) for run in runs):
        of = [run for run in runs if (run.choice, run.space) == (choice, space)]
        without, together = (sum(run.seconds[i] for run in of) for i in range(2))
        times = [run.seconds[1] / run.seconds[0] for run in of]
        sure = [run.first_confident for run in of if run.first_confident is not None]
        by_space[f"{choice}, {space}"] = {
            "num_devices": len(of),
            "times": together / without,
            "seconds": [_spread([run.seconds[i] for run in of]) for i in range(2)],
            "gain": _spread([run.gain for run in of]),
            "first_confident_true": sum(sure) / len(sure) if sure else None,
            "times_by_device": {
                "median": statistics.median(times),
                "p90": float(np.percentile(times, 90)),
                "max": max(times),
            },
            "check_times": sum(run.check_seconds[1] for run in of) / sum(run.check_seconds[0] for run in of),
            "regret": [_spread([run.regret[i] for run in of]) for i in range(2)],
        }
    return by_space


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(values),
        "p95": float(np.percentile(values, 95)),
        "max": max(values),
    }


def main(arguments: list[str] | None = None) -> int:
    """Compare on every seed, print the figures and write one JSON file; returns 1 if a space costs too much."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unseen.executions", description=__doc__)
    parser.add_argument("--seed-range", nargs=2, type=int, metavar=("FIRST", "END"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    first, end = options.seed_range
    if not 0 <= first < end:
        parser.error("--seed-range needs a first seed of at least 0, and an end above it")
    os.environ |= {name: os.environ.get(name, "1") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    tasks = [(seed, space, choice) for space, choice in RUNS for seed in range(first, end)]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        runs = list(pool.map(compare, *zip(*tasks, strict=True), chunksize=5))
    spaces = summarize(runs)
    results = {"environment": describe_environment(), "commit": describe_commit(), "seed_range": [first, end]}
    write_results(options.out, results | {"spaces": spaces, "runs": [asdict(run) for run in runs]})
    for name, space in spaces.items():
        regrets = " and ".join(f"{each['mean']:.2%} (p95 {each['p95']:.2%})" for each in space["regret"])
        print(f"{name}: {space['times']:.2f}x the device seconds on {space['num_devices']} devices; regret {regrets}")
    return int(any(space["times"] > MOST_TIMES for name, space in spaces.items() if name.startswith("graphs")))


if __name__ == "__main__":
    sys.exit(main())
