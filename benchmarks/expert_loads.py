"""How evenly the layers of a model use their experts, in the whole model and in a layer that is measured alone.

    python -m benchmarks.expert_loads --out benchmarks/results/cpu-expert-loads.json

Small models of several types with random weights, in float32 on the CPU. A layer alone gets the embedding's output, or
hidden states of a typical depth, which is what the target `transformers` gives it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import describe_environment, write_results

if TYPE_CHECKING:
    from torch import nn

COMMON = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4, "head_dim": 64, "sliding_window": 128},
    "olmoe": {"num_experts": 64, "num_experts_per_tok": 8},
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 96, "head_dim": 64},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": {
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 176,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
}


def main(arguments: list[str] | None = None) -> int:
    """Look at every model with every micro-batch size, and write one JSON file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expert_loads", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    rows = [look(name, size, options) for name in options.models for size in options.micro_batch_sizes]
    write_results(options.out, {"environment": describe_environment(), "settings": settings, "rows": rows})
    return 0


def look(model_type: str, micro_batch_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The loads of the layers of one model: the mean over its layers (or kinds of layer) and the seeds."""
    config = {
        "model_type": model_type,
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "intermediate_size": options.hidden // 2,
        **COMMON,
        **MODELS[model_type],
    }
    found: dict[str, list[dict[str, float]]] = {"whole": [], "of_embedding": [], "of_part": []}
    for seed in range(options.seeds):
        for name, loads in _of_seed(config, micro_batch_size, options.seq_length, seed).items():
            found[name] += loads
    row = {
        name: {key: statistics.mean(load[key] for load in loads) for key in loads[0]} for name, loads in found.items()
    }
    median = statistics.median(load["busiest"] for load in found["whole"])
    return {"model_type": model_type, "micro_batch_size": micro_batch_size, "whole_median": median, **row}


def _of_seed(config: dict[str, Any], size: int, seq_length: int, seed: int) -> dict[str, list[dict[str, float]]]:
    import torch  # noqa: PLC0415 - the command's help needs none of this

    from bexp.transformers.experts import expert_modules  # noqa: PLC0415 - needs torch
    from bexp.workers.targets.transformers.config import quiet_library  # noqa: PLC0415 - needs torch
    from bexp.workers.targets.transformers.model import BuildSettings  # noqa: PLC0415 - needs torch
    from bexp.workers.targets.transformers.resolved import resolve  # noqa: PLC0415 - needs torch

    resolved = resolve(config, seq_length, settings=BuildSettings(dtype=torch.float32, seed=seed))
    builder = resolved.builder(torch.device("cpu"))
    batch = builder.batch(size)
    model = builder.whole()
    with _loads(model) as whole, torch.no_grad(), quiet_library():
        model(**batch, use_cache=False)
    del model
    of_embedding: list[dict[str, float]] = []
    of_part: list[dict[str, float]] = []
    for kind in dict.fromkeys(resolved.kinds):
        index = resolved.kinds.index(kind)
        layer = builder.skeleton.layers[index]
        if not expert_modules(layer):
            continue
        call = builder.skeleton.call(batch, index)
        with _loads(layer) as loads, torch.no_grad():
            layer(*call.args, **call.kwargs)
        of_embedding += loads
        with _loads(layer) as loads:
            builder.layer(kind, size).forward()
        of_part += loads[-1:]  # those before it are of the sequences that go through the layers once
    return {"whole": whole, "of_embedding": of_embedding, "of_part": of_part}


@contextmanager
def _loads(module: nn.Module) -> Iterator[list[dict[str, float]]]:
    """For each call of experts inside the context: tokens of the busiest one over the mean, and experts with tokens."""
    from bexp.transformers.experts import expert_modules  # noqa: PLC0415 - needs torch

    found: list[dict[str, float]] = []

    def record(experts: Any, args: tuple[Any, ...]) -> None:
        counts = args[1].flatten().bincount()
        num_experts = experts.gate_up_proj.shape[0]
        busiest = float(counts.max()) * num_experts / float(counts.sum())
        found.append({"busiest": busiest, "used": float((counts > 0).sum()), "num_experts": num_experts})

    hooks = [experts.register_forward_pre_hook(record) for experts in expert_modules(module)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


if __name__ == "__main__":
    raise SystemExit(main())
