"""How long the fused experts' kernels take to build: one after another, side by side, and from the cache.

    python -m benchmarks.kernel_builds --out results/NAME.json [--threads 8]

Each way runs in a process and with a cache folder of its own, so that nothing is built before. A process runs forward
and backward of an OLMoE layer with few, some and many rows an expert, which take different kernels. `side by side`
first runs them without launching anything, while Triton's threads build what each launch would need; the launches then
find their kernels. `cached` is a second process with the folder of the first way. All ways must give the same results.
It needs a GPU and Triton 3.5.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import describe_environment, write_results
from bexp.child_process import module_command, safe_environment

NUM_EXPERTS, TOP_K, WIDTH, HIDDEN = 64, 8, 2048, 1024
TOKENS = (64, 512, 4096, 32768)
WAYS = ("one after another", "side by side", "cached")
DEFAULT_THREADS = 8


def main(arguments: list[str] | None = None) -> int:
    """Run each way in a process, print the seconds and write one JSON file; returns 1 if the results differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_builds", description="Builds of kernels.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=DEFAULT_THREADS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.way is not None:
        print(json.dumps(run_way(options.way, options.threads)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = {way: _run_process(way, options.threads, Path(folder)) for way in WAYS}
    for way, figures in found.items():
        print(f"{way:<18} {figures['build_seconds']:6.1f} s until all ran once, {figures['again_seconds']:.3f} s again")
    if options.out is not None:
        environment = describe_environment()
        write_results(options.out, {"environment": environment, "threads": options.threads, "ways": found})
    if len({tuple(figures["sums"]) for figures in found.values()}) == 1:
        return 0
    print("the results differ", file=sys.stderr)
    return 1


def run_way(way: str, threads: int) -> dict[str, Any]:
    """Return the seconds of the first and of a second forward and backward of all sizes, and sums of the results."""
    device = torch.device("cuda")
    torch.zeros(1, device=device).sum().item()
    started = time.perf_counter()
    if way == "side by side":
        with _building(threads):
            _run_all(device)
    prepared = time.perf_counter()
    sums = _run_all(device)
    ran = time.perf_counter()
    _run_all(device)
    return {
        "build_seconds": ran - started,
        "prepare_seconds": prepared - started,
        "again_seconds": time.perf_counter() - ran,
        "sums": sums,
    }


def _run_all(device: torch.device, sizes: Sequence[int] = TOKENS) -> list[float]:
    from bexp.kernels.experts.fused.function import fused_ffn  # noqa: PLC0415 - needs Triton

    generator = torch.Generator(device).manual_seed(0)
    sums = []
    for num_tokens in sizes:
        shapes = ((num_tokens, WIDTH), (NUM_EXPERTS, WIDTH, 2 * HIDDEN), (NUM_EXPERTS, HIDDEN, WIDTH))
        x, w_in, w_out = (
            torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).div_(32).requires_grad_()
            for shape in shapes
        )
        places = torch.arange(num_tokens * TOP_K, device=device)
        routes = (places * 7).remainder(NUM_EXPERTS).view(num_tokens, TOP_K)  # 7 and 64 have no common factor
        weights = torch.full_like(routes, 1 / TOP_K, dtype=torch.bfloat16)
        out = fused_ffn(x, routes, weights, w_in, w_out, "silu")
        out.backward(torch.ones_like(out))
        sums += [
            float(tensor.detach().double().sum())
            for tensor in (out, x.grad, w_in.grad, w_out.grad)
            if tensor is not None
        ]
    return sums


@contextlib.contextmanager
def _building(threads: int) -> Iterator[None]:
    """Let launches build their kernel in a thread instead of running it; the end waits for all builds."""
    from triton.runtime._async_compile import AsyncCompileMode, active_mode  # noqa: PLC0415 - optional
    from triton.runtime.jit import JITFunction  # noqa: PLC0415 - optional

    launch = JITFunction.run
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool) as mode:

        def build(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            token = active_mode.set(mode)  # the backward pass launches from a thread that knows nothing of the mode
            try:
                return launch(self, *arguments, grid=grid, warmup=True, **named)
            finally:
                active_mode.reset(token)

        JITFunction.run = build
        try:
            yield
        finally:
            JITFunction.run = launch


def _run_process(way: str, threads: int, folder: Path) -> dict[str, Any]:
    cache = folder / ("side" if way == "side by side" else "serial")
    environment = safe_environment({**os.environ, "TRITON_CACHE_DIR": str(cache)})
    command = module_command("benchmarks.kernel_builds", "--way", way, "--threads", str(threads))
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
