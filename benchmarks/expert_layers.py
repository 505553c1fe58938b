"""MoE layers on every expert kernel that is installed: from routing weights to the combined output, and backward.

    python -m benchmarks.expert_layers --out results/NAME.json [--max-seconds S] [--only NAME ...] [--device cpu --tiny]

24 shapes: 8 to 128 experts of 2048 x 1024 with a gated SiLU in bfloat16, top-1 to top-8, 512 to 32,768 tokens, under
even loads and Zipf loads. Contenders are all expert back ends, torch's also compiled. Each takes its matrices in
the layout in which it is faster: as transformers stores them, (E, 2H, D) and (E, D, H), or their transposes. Packages
that would copy the transposes in each forward take the first.
liger-kernel tunes its tiles beforehand; sonic-moe runs with its default tiles unless `--tune-sonicmoe` is given, for it
tunes each shape for minutes.

Results are compared with float64. All contenders of a shape are timed in turns: by the clock in a loop of forwards and
backwards, and on the device with the launches queued ahead, with standard errors. The peak counts operands, results and
gradients. If the file exists, the run continues it.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import kernel_builds, liger_tiles
from benchmarks.environment import begin, describe_commit, describe_environment, kernels_digest, write_results
from benchmarks.expert_problems import Experts, Prepared
from benchmarks.expert_runs import Problem, measure, missing
from benchmarks.turns import seconds_once
from benchmarks.variable_cases import routes_of, split_evenly
from benchmarks.variable_gemm import describe_device, versions
from bexp.explorer.model.model import MoESpec
from bexp.explorer.model.routes import draw_batch_routes
from bexp.explorer.model.routing import RoutingSpec
from bexp.explorer.records.measurement import Outcome
from bexp.kernels.experts.registry import expert_backend
from bexp.kernels.shapes import ExpertsShape

HIDDEN, WIDTH = 2048, 1024
MAX_SECONDS = 235.0
SHAPES = (
    *((64, 8, 8192), (8, 2, 8192), (128, 8, 16384), (8, 1, 4096), (128, 1, 8192), (32, 8, 16384)),
    *((16, 4, 2048), (64, 8, 1024), (8, 2, 32768), (128, 8, 2048), (8, 2, 512), (64, 4, 32768)),
)
"""Experts, top_k and tokens. liger-kernel tunes its tiles on the first."""
EVEN, ZIPF = "even", "zipf"
COMPILED = " compile"
OURS = ("fused", "hopper_grouped")
LAYOUTS = {"as in transformers": True, "transposed": False}
"""Whether the matrices are stored as (E, 2H, D) and (E, D, H)."""
OF_ONE_LAYOUT = ("liger", "sonicmoe")
"""What would copy the transposed ones in each forward."""
GOAL = 1.10
"""Of ours over the best other, in the geometric mean; level within two standard errors in each shape."""
CLOCKS = {"seconds": "clock_error_seconds", "device_seconds": "device_error_seconds"}
"""A time, and its standard error."""


@dataclass(frozen=True)
class Cell:
    """A shape under a load."""

    num_experts: int
    top_k: int
    num_tokens: int
    load: str
    hidden: int = HIDDEN
    width: int = WIDTH
    dtype: torch.dtype = torch.bfloat16
    poisons: bool = False
    tune_sonicmoe: bool = False
    only: tuple[str, ...] = ()
    """Its contenders, or none of them for all."""

    @property
    def key(self) -> dict[str, Any]:
        """What its rows have in common."""
        names = ("num_experts", "top_k", "num_tokens", "load")
        return {name: getattr(self, name) for name in names}

    @property
    def shape(self) -> ExpertsShape:
        """The experts."""
        return ExpertsShape(self.hidden, self.width, self.num_experts, self.top_k, self.dtype)

    def problems(self, device: torch.device) -> Iterator[tuple[dict[str, Any], Problem]]:
        """Yield the layer."""
        _prepare_packages(tune_sonicmoe=self.tune_sonicmoe)
        counts = split_evenly(self.num_tokens * self.top_k, self.num_experts)
        if self.load == EVEN:
            routes = routes_of(counts, self.num_tokens)
        else:
            moe = MoESpec(num_experts=self.num_experts, top_k=self.top_k, expert_ffn_hidden_size=self.width)
            drawn = torch.from_numpy(draw_batch_routes(moe, RoutingSpec(kind="zipf"), self.num_tokens, 0))
            routes = drawn.repeat(-(-self.num_tokens // drawn.shape[0]), 1)[: self.num_tokens].contiguous()
        yield {}, Layer(self.shape, routes.to(device), self.only)


CELLS = tuple(Cell(*shape, load) for shape in SHAPES for load in (EVEN, ZIPF))


class Layer(Experts):
    """Experts whose contenders choose the layout of their matrices."""

    def __init__(self, shape: ExpertsShape, routes: Tensor, only: Collection[str] = ()) -> None:
        self._only = only
        super().__init__(shape, routes)

    def contenders(self) -> dict[str, str | None]:
        """Return all back ends, and torch's grouped GEMM compiled, or those that were named."""
        found = super().contenders()
        if self.routes.is_cuda:
            found[f"grouped_mm{COMPILED}"] = found["grouped_mm"]
        return {name: reason for name, reason in found.items() if name in self._only or not self._only}

    def prepare(self, name: str) -> Prepared:
        """A forward and backward in the layout in which a few of them are faster."""
        backend = name.removesuffix(COMPILED)
        forward = compiled(backend) if name != backend else expert_backend(backend).forward
        x, weights, *matrices = self.leaves
        best, seconds = None, math.inf
        for layout, transposed in LAYOUTS.items():
            if backend in OF_ONE_LAYOUT and not transposed:
                continue
            lying = [_stored(w, transposed=transposed) for w in matrices]
            prepared = self.prepared(forward, [x, weights, *lying])
            found = seconds_once(prepared.run, x.device)
            if found < seconds:
                best, seconds = replace(prepared, setting={"layout": layout}), found
        assert best is not None, "there are two layouts"
        return best


@functools.cache
def compiled(name: str) -> Callable[..., Tensor]:
    """The back end, compiled for each shape by itself, as a training of one shape is."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(expert_backend(name).forward, dynamic=False)


@functools.cache
def _prepare_packages(*, tune_sonicmoe: bool) -> None:
    if find_spec("triton") is not None and find_spec("liger_kernel") is not None:
        liger_tiles.fewer_sums()
    if not tune_sonicmoe and find_spec("sonicmoe") is not None:
        for part in ("forward", "backward"):
            module = import_module(f"sonicmoe.functional.{part}")
            for name in ("gemm", "gemm_gated", "gemm_dgated"):
                if hasattr(module, name):
                    setattr(module, name, partial(getattr(module, name), tuned=False))


def _stored(w: Tensor, *, transposed: bool) -> Tensor:
    w = w.detach()
    return (w.mT.contiguous().mT if transposed else w.contiguous()).requires_grad_()


def main(arguments: list[str] | None = None) -> int:
    """Run the shapes that there is time for; 1 if a result was wrong or a process was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-seconds", type=float, default=MAX_SECONDS, help="start no shape after so long")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="two shapes of small sizes, for tests")
    parser.add_argument("--tune-sonicmoe", action="store_true", help="let sonic-moe tune each shape")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="contenders; default: all")
    parser.add_argument(
        "--shapes", type=int, nargs=2, default=(0, None), metavar="N", help="from one to before another"
    )
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.max_seconds
    only = tuple(options.only)
    cells = [
        replace(cell, tune_sonicmoe=options.tune_sonicmoe, only=only)
        for cell in (tiny_cells() if options.tiny else CELLS)[slice(*options.shapes)]
    ]
    has_liger = "liger" in only or not only
    if options.device != "cpu" and has_liger and find_spec("liger_kernel") is not None:
        try:
            liger_tiles.build(HIDDEN, WIDTH, options.device)
        except Exception as error:  # noqa: BLE001 - it is one contender of many
            print(f"liger-kernel's tiles were not built beforehand: {error}")
    fresh: dict[str, Any] = {
        "environment": describe_environment() | {"compared": versions()},
        "commit": describe_commit(),
        "hardware": describe_device(options.device),
        "kernels": kernels_digest(),
        "shape": {"hidden_size": HIDDEN, "expert_ffn_hidden_size": WIDTH, "dtype": "bfloat16"},
        "tune_sonicmoe": options.tune_sonicmoe,
        "rows": [],
        "left_out": [],
    }
    if only:
        fresh["only"] = list(only)
    try:
        results = begin(options.out, fresh, same=("kernels", "shape", "tune_sonicmoe", "only"))
    except ValueError as error:
        parser.error(str(error))
    cells = missing(cells, results["rows"])
    results["left_out"] = [cell.key for cell in cells]
    needed = ((cell.shape, cell.num_tokens, lies) for cell in cells for lies in LAYOUTS.values())
    kernel_builds.build(needed, options.device)
    for rows in measure(cells, options.device, deadline):
        results["rows"] += rows
        results["left_out"].pop(0)
        write_results(options.out, results | {"summary": summarize(results["rows"])})
        for row in rows:
            print(describe(row), flush=True)
    results["summary"] = summarize(results["rows"])
    write_results(options.out, results)
    for line in describe_summary(results["summary"]):
        print(line)
    bad = {"wrong", Outcome.CRASHED.value, Outcome.TIMED_OUT.value}
    return int(any(row["outcome"] in bad for row in results["rows"]))


def tiny_cells() -> list[Cell]:
    """Two shapes for a CPU."""
    return [Cell(4, 2, 32, load, hidden=32, width=16, dtype=torch.float32) for load in (EVEN, ZIPF)]


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ours against the best other, shape by shape, by the clock and on the device."""
    cells = []
    for key in dict.fromkeys(_key(row) for row in rows):
        timed = [row for row in rows if _key(row) == key and "seconds" in row]
        cell: dict[str, Any] = dict(zip(("num_experts", "top_k", "num_tokens", "load"), key, strict=True))
        for seconds, error in CLOCKS.items():
            ours = min((row for row in timed if row["contender"] in OURS), key=itemgetter(seconds), default=None)
            other = min((row for row in timed if row["contender"] not in OURS), key=itemgetter(seconds), default=None)
            if ours is None or other is None:
                continue
            errors = (row.get(error, 0.0) / row[seconds] for row in (ours, other))
            cell[seconds] = {
                "ours": ours["contender"],
                "best_other": other["contender"],
                "ratio": other[seconds] / ours[seconds],
                "relative_error": math.hypot(*errors),
                "peak_ratio": ours["peak_bytes"] / other["peak_bytes"] if ours["peak_bytes"] else None,
            }
        cells.append(cell)
    summary: dict[str, Any] = {"shapes": cells}
    for seconds in CLOCKS:
        found = [cell[seconds] for cell in cells if seconds in cell]
        ratios = [each["ratio"] for each in found]
        if ratios:
            summary[seconds] = {
                "shapes": len(ratios),
                "level_or_better": sum(each["ratio"] * (1 + 2 * each["relative_error"]) >= 1 for each in found),
                "geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)),
                "worst": min(ratios),
            }
    return summary


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("num_experts", "top_k", "num_tokens", "load"))


def describe(row: dict[str, Any]) -> str:
    """One line."""
    head = f"E={row['num_experts']:<4}k={row['top_k']:<2}T={row['num_tokens']:<6}{row['load']:5}{row['contender']:20}"
    if "seconds" not in row:
        return f"{head}{row['outcome']}: {row.get('reason', row.get('errors'))}"
    peak = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.2f} GiB"
    return (
        f"{head}{row['seconds'] * 1e3:9.3f} ms by the clock, {row['device_seconds'] * 1e3:9.3f} on the device, "
        f"{row['flops_per_second'] / 1e12:6.1f} TFLOP/s{peak}, error {row['largest_error']:.1e}, {row['layout']}"
    )


def describe_summary(summary: dict[str, Any]) -> Iterable[str]:
    """Yield ours against the best other."""
    for cell in summary["shapes"]:
        for seconds, where in (("seconds", "by the clock"), ("device_seconds", "on the device")):
            if seconds in cell:
                found = cell[seconds]
                yield (
                    f"E={cell['num_experts']} k={cell['top_k']} T={cell['num_tokens']} {cell['load']} {where}: "
                    f"{found['ours']} {found['ratio']:.3f}x of {found['best_other']} (+- {found['relative_error']:.1%})"
                )
    for seconds, where in (("seconds", "by the clock"), ("device_seconds", "on the device")):
        if seconds in summary:
            total = summary[seconds]
            yield (
                f"{where}: level or better in {total['level_or_better']} of {total['shapes']} shapes, geometric mean "
                f"{total['geometric_mean']:.3f}x (goal: {GOAL:.2f}x), worst {total['worst']:.3f}x"
            )


if __name__ == "__main__":
    sys.exit(main())
