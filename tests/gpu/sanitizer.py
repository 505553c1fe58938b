"""Runs every kernel once, at small shapes, under NVIDIA's compute-sanitizer.

    python -m tests.gpu.sanitizer [--tools memcheck racecheck synccheck] [--cases NAME ...] [--out FILE.json]

The kernels are built first, without the sanitizer. Then each tool watches one process that runs the cases one after the
other. The exit status is 0 if no tool found an error, 1 if one did, and 2 if there is no compute-sanitizer here.

Racecheck reports hazards in every kernel with `gl.warp_specialize`. They count as none if each is at a place of that
call, and of a byte in which Triton tells a warp what to run (`tests.gpu.sanitizer_races`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import kernels_digest
from bexp.kernels.experts.fused.hopper_support import has_hopper_kernels
from tests.gpu.sanitizer_races import MARK, hazards, num_of_warp_specialize, only_of_warp_specialize

TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND_ERRORS = 9
"""The exit status that the tool is told to use."""
_PLACES = ("usr/local/cuda*/bin", "usr/local/cuda*/compute-sanitizer", "usr/local/cuda*/extras/compute-sanitizer")
_SHOWN_LINES = 40
_MOST_SHOWN = 400
_COUNTS = (129, 0, 64, 1, 0, 318)
_MOST_REPORTS = 100_000
_OPTIONS = {"racecheck": ("--racecheck-report", "hazard")}


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, here or under the tools."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitizer", description=__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=120.0, help="a tool that takes longer is ended")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help="only run the cases, without a tool")
    options = parser.parse_args(arguments)
    if options.here:
        return run_here(options.cases)
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("there is no compute-sanitizer on PATH, in the CUDA toolkit, or in NVIDIA's Python packages")
        return 2
    if run_here(options.cases):
        return 1
    with ThreadPoolExecutor(len(options.tools)) as pool:
        running = [pool.submit(watch, sanitizer, tool, options.cases, options.seconds) for tool in options.tools]
        reports = [each.result() for each in running]
    for report in reports:
        told = f", {report['of_warp_specialize']} hazards of warp_specialize" if "of_warp_specialize" in report else ""
        print(f"{report['tool']}: {report['outcome']} in {report['seconds']:.0f} s{told}")
        if report["outcome"] != "clean":
            print("\n".join(report["output"]))
    if options.out is not None:
        options.out.write_text(
            json.dumps({"sanitizer": sanitizer, "kernels": kernels_digest(), "reports": reports}, indent=1)
        )
    return 0 if all(report["outcome"] == "clean" for report in reports) else 1


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer; null if it is not installed."""
    packages = [f"{folder.lstrip('/')}/nvidia/{place}" for folder in sys.path if folder for place in ("*", "*/bin")]
    folders = [str(folder) for place in (*_PLACES, *packages) for folder in sorted(Path("/").glob(place))]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def watch(sanitizer: str, tool: str, cases: list[str], seconds: float) -> dict[str, Any]:
    """Run the cases under a tool: `clean`, `errors`, `failed` if they did not run, or `timed_out`."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND_ERRORS), "--print-limit", str(_MOST_REPORTS)]
    command += ["--show-backtrace", "device", *_OPTIONS.get(tool, ())]
    command += [sys.executable, "-m", "tests.gpu.sanitizer", "--here", "--cases", *cases]
    started = time.monotonic()
    try:
        # Freed memory goes back to the driver, so that the tool sees accesses behind the end of a tensor.
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    except subprocess.TimeoutExpired as error:
        outcome, output = "timed_out", (error.stdout or b"").decode(errors="replace")  # bytes, whatever `text` says
    else:
        outcome = {0: "clean", FOUND_ERRORS: "errors"}.get(done.returncode, "failed")
        output = done.stdout + done.stderr
    report: dict[str, Any] = {"tool": tool, "seconds": time.monotonic() - started}
    if tool == "racecheck" and outcome == "errors":
        report["of_warp_specialize"] = num_of_warp_specialize(hazards(output))
        if only_of_warp_specialize(output):
            outcome = "clean"
    lines = output.splitlines()
    shown = [line for line in lines if line.startswith(("=====", MARK))] if outcome == "errors" else []
    return report | {"outcome": outcome, "output": shown[:_MOST_SHOWN] or lines[-_SHOWN_LINES:]}


def run_here(cases: list[str]) -> int:
    """Run the cases in this process. The line before an error says which case it belongs to."""
    for name in cases:
        if "opper" in name and not has_hopper_kernels(torch.device("cuda")):
            print(f"{name}: left out, because it needs a Hopper GPU")
            continue
        print(MARK + name, flush=True)
        for result in CASES[name]():
            assert torch.isfinite(result.float()).all(), f"{name}: a result is not finite"
        torch.cuda.synchronize()
    return 0


@dataclass(frozen=True)
class _Gemm:
    """Forward and both gradients of a grouped GEMM, whose matrices are stored either way."""

    transposed: bool

    def __call__(self) -> list[Tensor]:
        from bexp.kernels.experts.hopper_grouped.gemm import multiply

        x, w, grad = _random(sum(_COUNTS), 200), _random(len(_COUNTS), 200, 264), _random(sum(_COUNTS), 264)
        w = w.mT.contiguous().mT if self.transposed else w
        ends = torch.tensor(_COUNTS).cumsum(0).to("cuda", torch.int32)
        out = multiply(x.requires_grad_(), w.requires_grad_(), ends)
        return [out.detach(), *torch.autograd.grad(out, (x, w), grad)]


@dataclass(frozen=True)
class _Fused:
    """Forward and backward of the fused experts."""

    path: str
    num_tokens: int
    top_k: int = 2
    transposed: bool = False

    def __call__(self) -> list[Tensor]:
        from bexp.kernels.experts.fused.function import fused_ffn
        from tests.gpu.fused_paths import tiles_of

        routes = torch.rand(self.num_tokens, 6, device="cuda").topk(self.top_k).indices
        w_in, w_out = _random(6, 136, 400), _random(6, 200, 136)
        if self.transposed:
            w_in, w_out = (w.mT.contiguous().mT for w in (w_in, w_out))
        weights = torch.rand(self.num_tokens, self.top_k, device="cuda").bfloat16()
        leaves = [t.requires_grad_() for t in (_random(self.num_tokens, 136), weights, w_in, w_out)]
        x, weights, w_in, w_out = leaves
        out = fused_ffn(x, routes, weights, w_in, w_out, "silu", tiles_of(self.path))
        return [out.detach(), *torch.autograd.grad(out, leaves, _random(self.num_tokens, 136))]


def _router() -> list[Tensor]:
    from bexp.kernels.router import route

    scores = torch.randn(77, 24, device="cuda", requires_grad=True)
    forced = torch.rand(77, 24, device="cuda").topk(3).indices
    _, weights = route(scores, forced, norm_topk_prob=True, dtype=torch.float32, fused=True)
    return [weights.detach(), *torch.autograd.grad(weights.sum(), scores)]


def _merge() -> list[Tensor]:
    from bexp.kernels.context_parallel.merging import merge_block

    out, other = (_random(2, 3, length, 40) for length in (65, 33))
    lse, other_lse = (torch.randn(2, 3, length, device="cuda") for length in (65, 33))
    into = torch.empty_like(out)
    return [merge_block(out, lse, other, other_lse, 32, into), into]


def _copies() -> list[Tensor]:
    from bexp.kernels.expert_parallel.triton_sums import sum_rows

    starts = torch.tensor([0, 2, 2, 5, 9], device="cuda")
    return [sum_rows(_random(9, 1100), torch.randperm(9, device="cuda"), starts)]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


CASES: dict[str, Callable[[], list[Tensor]]] = {
    "hopper": _Gemm(False),
    "hopper, transposed": _Gemm(True),
    "fused, few rows": _Fused("chosen", 40),
    "fused, one route": _Fused("chosen", 700, top_k=1),
    "fused, in Triton": _Fused("triton", 300),
    "fused, for Hopper": _Fused("hopper", 300),
    "fused, for Hopper, transposed": _Fused("hopper, the other way to gather", 300, transposed=True),
    "fused, for Hopper, rows by token": _Fused("hopper, rows by token", 300),
    "fused, for Hopper, one route": _Fused("hopper", 300, top_k=1),
    "router": _router,
    "merged attention": _merge,
    "sums of copies": _copies,
}

if __name__ == "__main__":
    sys.exit(main())
