"""Compares the loss curves of patched and unpatched transformers models under transformers' own Trainer.

    python -m benchmarks.loss_curves --out benchmarks/results/loss-curves.json
    python -m benchmarks.loss_curves --models llama --layers 2 --hidden 64 --seq-length 64 --steps 40 --out curves.json
    python -m benchmarks.loss_curves --models olmoe --layers 2 --hidden 512 --implementations bexp_fused --out FILE

Each model is trained on the bytes of Python's standard library: unpatched with two seeds (of weights and of the order
of the text), and set up by `bexp.apply` with the first of these seeds. `--settings` replaces what is applied, and
`--implementations` sets one implementation of the experts after the other, and nothing else. One that fails is a row
with its error.

The patched curve counts as within the spread of the seeds if both hold. Losses are averaged over windows of ten steps.

- The root mean square over the windows of (patched - unpatched, same seed) is at most that of (unpatched - unpatched,
  other seed).
- No window of the second half differs by more than the largest difference of the two seeds in any window of that half.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_commit, describe_environment, write_results

WINDOW = 10
SEEDS = (0, 1)
TEXT_BYTES = 16 * 2**20
VOCAB_SIZE = 256
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"loss": "chunked", "recompute": "partial_50", "bta_tile": 4},
    "olmoe": {"loss": "chunked", "experts": "bexp_fused"},
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_curves", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--device", help="cuda:0 or cpu; default: a GPU, if there is one")
    applied = parser.add_mutually_exclusive_group()
    applied.add_argument("--settings", type=json.loads, help="what is applied, as `bexp.Settings` names it")
    applied.add_argument("--implementations", nargs="+", help="of experts, each alone, for models that have experts")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.device is not None:  # the Trainer takes all devices that it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = _visible(options.device)
    text = standard_library()
    _report(f"{len(text)} bytes of text")
    results: dict[str, Any] = {
        "environment": describe_environment(),
        "device": _device_name(),
        "commit": describe_commit(),
        "arguments": {name: value for name, value in vars(options).items() if name != "out"},
        "text": {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()},
        "models": {},
    }
    within = True
    for family in options.models:
        choices = {family: SETTINGS[family] if options.settings is None else options.settings}
        if options.implementations is not None:
            choices = {f"{family}, {name}": {"experts": name} for name in options.implementations}
        unpatched = [train(family, options, text, seed=seed) for seed in SEEDS]
        for name, settings in choices.items():
            row = _row(family, options, text, settings, unpatched)
            within = within and row.get("within", False)
            results["models"][name] = row
            write_results(options.out, results)
            print(f"{name}: {row['error']}" if "error" in row else _line(name, row, row["runs"]), flush=True)
    return 0 if within else 1


def _row(
    family: str, options: argparse.Namespace, text: bytes, settings: dict[str, Any], unpatched: list[dict[str, Any]]
) -> dict[str, Any]:
    """Train with `settings`, and compare the curve with those of the two unpatched runs."""
    try:
        runs = [*unpatched, train(family, options, text, seed=SEEDS[0], settings=settings)]
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises is the row's result
        return {"settings": settings, "error": f"{type(error).__name__}: {error}"[:600]}
    return {"settings": settings, **compare(*(run["losses"] for run in runs)), "runs": runs}


def _visible(device: str) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES with which a process sees one device alone."""
    kind, _, index = device.partition(":")
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    place = int(index or 0)
    return "" if kind == "cpu" else seen[place] if seen else str(place)


def standard_library(limit: int = TEXT_BYTES) -> bytes:
    """The first bytes of the standard library's modules, in the order of their names."""
    text = bytearray()
    for path in _modules(Path(sysconfig.get_paths()["stdlib"])):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return bytes(text[:limit])


def _modules(folder: Path) -> Iterator[Path]:
    """Python files below a folder, in order. Installed packages are left out, and their folder is not even listed."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in ("site-packages", "dist-packages"):
            yield from _modules(path)
        elif path.suffix == ".py" and path.is_file():
            yield path


def compare(unpatched: Sequence[float], other_seed: Sequence[float], patched: Sequence[float]) -> dict[str, Any]:
    """Return the differences of the averaged curves, and whether the patched one is within the spread of the seeds.

    A curve that is not finite is not within it.
    """
    first, second, third = (_windows(curve) for curve in (unpatched, other_seed, patched))
    seeds = [abs(a - b) for a, b in zip(first, second, strict=True)]
    patch = [abs(a - b) for a, b in zip(first, third, strict=True)]
    half = len(seeds) // 2
    spread, distance = _root_mean_square(seeds), _root_mean_square(patch)
    return {
        "spread": spread,
        "distance": distance,
        "largest_spread": max(seeds[half:]),
        "largest_distance": max(patch[half:]),
        "within": distance <= spread and max(patch[half:]) <= max(seeds[half:]),
    }


def train(
    family: str, options: argparse.Namespace, text: bytes, *, seed: int, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One run of the Trainer: the loss of each step, and what it took. `settings` are applied if there are any."""
    import torch  # noqa: PLC0415 - the criterion above needs none of this
    from transformers import Trainer, TrainingArguments, set_seed  # noqa: PLC0415 - what judges curves needs neither torch nor transformers

    import bexp  # noqa: PLC0415 - what judges curves needs neither torch nor transformers

    cuda = torch.cuda.is_available()
    set_seed(seed)
    dtype = getattr(torch, options.dtype or ("bfloat16" if cuda else "float32"))
    model = build(family, options, dtype).to("cuda" if cuda else "cpu")
    applied = None
    if settings is not None:
        setup = bexp.RecommendedSetup(bexp.Settings(**settings), micro_batch_size=options.micro_batch_size)
        applied = str(bexp.apply(model, setup)).splitlines()
    losses = _Losses()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.micro_batch_size,
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            warmup_steps=max(1, options.steps // 15),
            lr_scheduler_type="cosine",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=seed,
            use_cpu=not cuda,
            bf16=dtype is torch.bfloat16,
            dataloader_drop_last=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=_Blocks(text, options.seq_length))
        trainer.remove_callback(_printer())
        trainer.add_callback(losses.callback())
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    _report(f"{family}, seed {seed}, {'unpatched' if settings is None else 'patched'}: {seconds:.1f} s")
    result = {
        "seed": seed,
        "applied": applied,
        "losses": losses.values,
        "seconds": seconds,
        "tokens_per_second": options.steps * options.micro_batch_size * options.seq_length / seconds,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }
    del trainer, model
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return result


def build(family: str, options: argparse.Namespace, dtype: Any) -> Any:
    """A small model of the family with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig, OlmoeConfig  # noqa: PLC0415 - what judges curves needs neither torch nor transformers

    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.heads,
        "max_position_embeddings": options.seq_length,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": False,
    }
    if family == "llama":
        config: Any = LlamaConfig(**sizes, intermediate_size=options.hidden * 11 // 4)
    else:
        experts = {"num_experts": options.experts, "num_experts_per_tok": options.top_k}
        config = OlmoeConfig(**sizes, **experts, intermediate_size=options.hidden // 2)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


class _Losses:
    """The loss of each step, as the Trainer logs it."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def callback(self) -> Any:
        """What the Trainer calls."""
        from transformers import TrainerCallback  # noqa: PLC0415 - what judges curves needs neither torch nor transformers

        values = self.values

        class Recorder(TrainerCallback):
            """Keeps the logged losses."""

            def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
                """Keep the loss of a step; the last log of a run has none."""
                if logs is not None and "loss" in logs:
                    values.append(float(logs["loss"]))

        return Recorder()


def _printer() -> Any:
    from transformers import PrinterCallback  # noqa: PLC0415 - what judges curves needs neither torch nor transformers

    return PrinterCallback


class _Blocks:
    """Training texts of one length; their labels are the same bytes."""

    def __init__(self, text: bytes, seq_length: int) -> None:
        self._text, self._seq_length = text, seq_length

    def __len__(self) -> int:
        """The number of whole texts."""
        return len(self._text) // self._seq_length

    def __getitem__(self, index: int) -> dict[str, Any]:
        block = list(self._text[index * self._seq_length : (index + 1) * self._seq_length])
        return {"input_ids": block, "labels": block}


def _windows(curve: Sequence[float]) -> list[float]:
    """The means of whole windows; of a curve that is shorter, the mean of all of it."""
    starts = range(0, max(1, len(curve) - WINDOW + 1), WINDOW)
    return [sum(curve[start : start + WINDOW]) / len(curve[start : start + WINDOW]) for start in starts]


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def _report(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def _device_name() -> str:
    import torch  # noqa: PLC0415 - what judges curves needs neither torch nor transformers

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _line(family: str, comparison: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    seconds = ", ".join(f"{run['seconds']:.1f} s" for run in runs)
    last = ", ".join(f"{_windows(run['losses'])[-1]:.4f}" for run in runs)
    return (
        f"{family}: patched - unpatched {comparison['distance']:.5f}, seeds {comparison['spread']:.5f} "
        f"(root mean squares); second half at most {comparison['largest_distance']:.5f} and "
        f"{comparison['largest_spread']:.5f}; last losses {last}; "
        f"{'within' if comparison['within'] else 'NOT within'} the spread ({seconds})"
    )


if __name__ == "__main__":
    sys.exit(main())
