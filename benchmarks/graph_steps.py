"""Whole training steps by the clock in eager, compiled, as CUDA graphs, and as CUDA graphs of compiled layers.

    python -m benchmarks.graph_steps --out graphs.json

Each case is a model of transformers with random weights in bf16, at one micro-batch size, in a process of its own. It
times the executions in turns, on one model with one optimizer. A micro-step is forward, loss and backward; a step adds
clipping, fused AdamW and dropping the gradients.

Losses are those of the same micro-batch on the same weights. The peak of an execution is measured before the others
have any memory, over whole steps, captures included.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment, write_results

GPT2 = {"model_type": "gpt2", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
OLMOE = {
    "model_type": "olmoe",
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 4096,
}
CASES: dict[str, dict[str, Any]] = {
    "gpt2-124m m=1": {"config": GPT2, "seq_length": 1024, "micro_batch_size": 1},
    "gpt2-124m m=2": {"config": GPT2, "seq_length": 1024, "micro_batch_size": 2},
    "gpt2-124m m=4": {"config": GPT2, "seq_length": 1024, "micro_batch_size": 4},
    "llama-3.2-1b m=1": {"config": LLAMA, "seq_length": 2048, "micro_batch_size": 1, "loss": "chunked"},
    "olmoe-8-layers m=1": {
        "config": OLMOE,
        "seq_length": 4096,
        "micro_batch_size": 1,
        "loss": "chunked",
        "experts": "bexp_fused",
    },
    "tiny": {
        "config": {**LLAMA, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "intermediate_size": 128},
        "seq_length": 32,
        "micro_batch_size": 1,
    },
}
EXECUTIONS = ("eager", "compile", "graph", "compile+graph")
ROUNDS, STEPS = 5, 5


def main(arguments: list[str] | None = None) -> int:
    """Run all cases and write one JSON file, after each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graph_steps", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--executions", nargs="+", choices=EXECUTIONS, default=EXECUTIONS)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=[name for name in CASES if name != "tiny"])
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    for name in options.cases:
        # a case that fails on the device leaves it unusable for this process
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            results[name] = process.submit(measure, CASES[name], options.device, tuple(options.executions)).result()
        run = {"environment": describe_environment(), "cases": CASES, "results": results}
        write_results(options.out, {"device": options.device, "runs": [run]})
        print(_lines(name, results[name]), flush=True)
    return 0


def measure(setting: dict[str, Any], device: str, executions: tuple[str, ...]) -> dict[str, Any]:
    """Return the times and peaks of a case, or its error."""
    try:
        runs = _Runs(setting, device, executions)
        runs.prepare()
        return runs.time()
    except Exception as error:  # noqa: BLE001 - it is the case's result
        return {"error": f"{type(error).__name__}: {error}"[:500]}


class _Runs:
    """One model whose executions are switched: compiled layers and a captured micro-step are set aside and put back."""

    def __init__(self, setting: dict[str, Any], device: str, executions: tuple[str, ...]) -> None:
        import torch  # noqa: PLC0415 - in the child alone
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - in the child alone

        from bexp.transformers.layers import decoder_layers  # noqa: PLC0415 - in the child alone
        from bexp.transformers.set_up import set_up  # noqa: PLC0415 - in the child alone
        from bexp.transformers.settings import Settings  # noqa: PLC0415 - in the child alone

        torch.manual_seed(0)
        self.cuda = device == "cuda"
        self.executions = executions
        config = dict(setting["config"])
        kind = config.pop("model_type")
        no_tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        with torch.device(device):
            self.model: Any = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(kind, **config, **no_tokens), dtype=torch.bfloat16
            ).train()
        set_up(self.model, Settings(experts=setting.get("experts"), loss=setting.get("loss", "library")))
        self.model.config.use_cache = False
        self.layers = decoder_layers(self.model)
        self.plain = self.model.forward
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, fused=True)
        shape = (setting["micro_batch_size"], setting["seq_length"])
        tokens = torch.randint(self.model.config.vocab_size, shape, device=device)
        self.batch = {"input_ids": tokens, "labels": tokens}
        self.compiled: list[Any] = []
        self.forwards: dict[str, Any] = {}
        self.recorder: Any = None  # the graphs of a model have one pool of memory
        self.peaks: dict[str, int | None] = {}
        self.losses: dict[str, float] = {}
        self.norms: dict[str, float] = {}
        self.problems: dict[str, str] = {}

    def prepare(self) -> None:
        """Compile, capture, and measure the peak of each execution, before its own graphs are made for the timing."""
        import torch  # noqa: PLC0415 - in the child alone

        self._drop_graphs()
        self.step()  # the optimizer's states exist from now on
        for execution in self.executions:
            with self.set(execution):
                loss = self.model(**self.batch).loss
                loss.backward()
                self.losses[execution] = float(loss)
                self.norms[execution] = float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters]))
                del loss
                self.optimizer.zero_grad()
            if (forward := self.forwards.get(execution)) is not None and forward.loss.problem is not None:
                self.problems[execution] = forward.loss.problem
        self._drop_graphs()
        for execution in self.executions:
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()
            with self.set(execution):
                for _ in range(3):
                    self.step()
            self.peaks[execution] = torch.cuda.max_memory_allocated() if self.cuda else None
            self._drop_graphs()
        for execution in self.executions:
            with self.set(execution):
                self.step()

    def time(self) -> dict[str, Any]:
        """Time micro-steps and steps of all executions in turns."""
        seconds: dict[str, dict[str, list[float]]] = {
            what: {execution: [] for execution in self.executions} for what in ("micro_step", "step")
        }
        for _ in range(ROUNDS):
            for what, run in (("micro_step", self.micro_step), ("step", self.step)):
                for execution in self.executions:
                    with self.set(execution):
                        run()
                        seconds[what][execution].append(self._timed(run))
        timed: dict[str, Any] = {"losses": self.losses, "gradient_norms": self.norms, "peak_bytes": self.peaks}
        for what, samples in seconds.items():
            timed[f"{what}_seconds"] = {
                execution: {"median": statistics.median(each), "least": min(each), "most": max(each)}
                for execution, each in samples.items()
            }
        return {**timed, "problems": self.problems}

    def micro_step(self) -> None:
        """Forward, loss and backward."""
        self.model(**self.batch).loss.backward()

    def step(self) -> None:
        """A micro-step and the update."""
        from torch.nn.utils import clip_grad_norm_  # noqa: PLC0415 - in the child alone

        self.micro_step()
        clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def set(self, execution: str) -> Iterator[None]:
        """Within the context, the model runs like this."""
        from bexp.transformers.graph import GraphedForward  # noqa: PLC0415 - in the child alone

        if "compile" in execution and not self.compiled:
            for layer in self.layers:
                layer.compile()
            self.compiled = [layer._compiled_call_impl for layer in self.layers]
        for i, layer in enumerate(self.layers):
            layer._compiled_call_impl = self.compiled[i] if "compile" in execution else None
        if "graph" in execution:
            if execution not in self.forwards:
                self.forwards[execution] = GraphedForward(self.model, self.plain, self.recorder)
                for other in self.forwards.values():  # the gradients of all graphs are the same tensors
                    self.forwards[execution].loss._state = other.loss._state or self.forwards[execution].loss._state
            self.model.forward = self.forwards[execution]
        try:
            yield
        finally:
            vars(self.model).pop("forward", None)

    def _timed(self, run: Callable[[], None]) -> float:
        """Seconds of one of several runs in a row."""
        self._synchronize()
        started = time.perf_counter()
        for _ in range(STEPS):
            run()
        self._synchronize()
        return (time.perf_counter() - started) / STEPS

    def _synchronize(self) -> None:
        import torch  # noqa: PLC0415 - in the child alone

        if self.cuda:
            torch.cuda.synchronize()

    def _drop_graphs(self) -> None:
        import torch  # noqa: PLC0415 - in the child alone

        from bexp.graphs.recorder import CudaRecorder  # noqa: PLC0415 - in the child alone

        self.forwards.clear()
        self.recorder = CudaRecorder()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def _lines(name: str, result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{name}: {result['error']}"
    lines = []
    for what in ("micro_step", "step"):
        seconds = result[f"{what}_seconds"]
        eager = seconds[next(iter(seconds))]["median"]
        for execution, each in seconds.items():
            peak = result["peak_bytes"][execution]
            spread = f"{1e3 * each['least']:.2f} to {1e3 * each['most']:.2f}"
            lines.append(
                f"{name:20s} {what:10s} {execution:14s} {1e3 * each['median']:8.2f} ms ({spread})"
                f" {eager / each['median']:5.2f}x  loss {result['losses'][execution]:.4f}"
                f" norm {result['gradient_norms'][execution]:.4f}"
                + ("" if peak is None else f"  peak {peak / 2**30:.2f} GiB")
                + (f"  {result['problems'][execution]}" if execution in result["problems"] else "")
            )
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise SystemExit(main())
