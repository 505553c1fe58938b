"""Whole training steps of mixtures over several devices: transformers' expert parallelism next to sharding.

    torchrun --nproc-per-node 2 -m benchmarks.expert_sharding --out benchmarks/results/NAME.json
    torchrun --nproc-per-node 2 -m benchmarks.expert_sharding --tiny --device cpu --out FILE

The models are slices of published ones, in bfloat16, with random weights, AdamW and sequences of 4,096 tokens. All
contenders begin with the same weights, and a micro-batch of a size has the same sequences for all of them:

- `experts apart` is `from_pretrained(distributed_config=...)` with as many parts of the experts as ranks, which a
  Trainer takes as well: each rank has its own sequences and experts, tokens travel, and everything else is sharded.
- `experts and layers apart` has tensor parallelism beside it: all ranks have the sequences of all.
- `enable_expert_parallel` is transformers' older switch, of which the same holds.
- `sharded by transformers` is `experts apart` without that. `sharded` is torch's fully_shard in a loop, by layers.
- `sharded, set up` has in addition the experts and the loss that `bexp.apply` may set.

A step is forward, backward and the optimizer. Tokens are those of all ranks together; a step takes the slowest rank's
time, and peaks are those of the fullest. The first loss, and the norms of its gradients, tell whether two contenders
compute the same. A row that fails has its error. A second start goes on after the row that ended the first.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from benchmarks.environment import describe_commit
from benchmarks.rank_runs import Row, Rows, join_ranks, largest, parser_of, peak_bytes, slowest_seconds
from bexp.transformers.layers import decoder_layers
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings

MODELS: dict[str, dict[str, Any]] = {
    "olmoe-1b-7b, 6 layers": {
        **{"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 6},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8},
    },
    "qwen3-30b-a3b, 3 layers": {
        **{"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 3},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True},
        **{"num_experts": 128, "num_experts_per_tok": 8},
    },
}
TINY: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
    **{"num_experts": 8, "num_experts_per_tok": 2},
}
LENGTH, TINY_LENGTH = 4096, 32
SIZES = (1, 4, 8)
"""Sequences of a rank's micro-batch."""
WARM_UP, STEPS = 2, 4


def distributed(**parts: Any) -> Callable[[Path, torch.device], Any]:
    """Return the contender that transformers spreads when it loads it."""

    def load(folder: Path, device: torch.device) -> Any:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds
        from transformers.distributed import DistributedConfig  # noqa: PLC0415 - likewise

        given = {name: dist.get_world_size() if size is None else size for name, size in parts.items()}
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", distributed_config=DistributedConfig(**given))

    return load


def sharded(settings: Settings) -> Callable[[Path, torch.device], Any]:
    """Return the contender that torch shards by layers, after it was set up."""

    def load(folder: Path, device: torch.device) -> Any:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map={"": device})
        set_up(model, settings)
        for unit in [*decoder_layers(model), model]:
            fully_shard(unit)
        return model

    return load


ALL = None
"""As many parts as ranks."""
SHARED_BATCH = ("experts and layers apart", "enable_expert_parallel")
"""Contenders whose ranks have the same sequences."""
CONTENDERS: dict[str, Callable[[Path, torch.device], Any]] = {
    "sharded": sharded(Settings()),
    "experts apart": distributed(fsdp_size=ALL, ep_size=ALL),
    "sharded, set up": sharded(Settings(experts="bexp_fused", loss="chunked")),
    "sharded by transformers": distributed(fsdp_size=ALL),
    "experts and layers apart": distributed(tp_size=ALL, ep_size=ALL),
    "enable_expert_parallel": distributed(tp_size=ALL, enable_expert_parallel=True),
}


def save(config: dict[str, Any], folder: Path, device: torch.device) -> None:
    """Write a model with random weights, which the ranks load."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    if dist.get_rank() == 0:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with device:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
        model.save_pretrained(folder)
    dist.barrier()


class Contender:
    """A model over the ranks, with its optimizer."""

    def __init__(self, name: str, folder: Path, device: torch.device, length: int) -> None:
        self._has_shared_batch = name in SHARED_BATCH
        self._device, self._length = device, length
        self._model = CONTENDERS[name](folder, device).train()
        self._optimizer = torch.optim.AdamW(self._groups(), lr=1e-6, fused=True)

    def _groups(self) -> list[dict[str, Any]]:
        """Return the parameters by the ranks that hold parts of them, which no fused step mixes."""
        groups: dict[Any, list[Any]] = defaultdict(list)
        for parameter in self._model.parameters():
            groups[getattr(parameter, "device_mesh", None)].append(parameter)
        return [{"params": parameters} for parameters in groups.values()]

    def measure(self, size: int) -> Row:
        """Return the figures of steps with micro-batches of `size` sequences on each rank."""
        ranks = dist.get_world_size()
        generator = torch.Generator().manual_seed(size)
        vocabulary = self._model.config.vocab_size
        tokens = torch.randint(vocabulary, (size * ranks, self._length), generator=generator).to(self._device)
        own = tokens if self._has_shared_batch else tokens.chunk(ranks)[dist.get_rank()]
        self._optimizer.zero_grad(set_to_none=True)  # a size that lacked memory may have left some
        loss, norms = self._backward(own), self._gradient_norms()
        self._update()
        for _ in range(WARM_UP):
            self._step(own)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        seconds = [slowest_seconds(partial(self._step, own), self._device) for _ in range(STEPS)]
        dist.all_reduce(loss)
        speeds = [tokens.numel() / each for each in seconds]
        return {
            "tokens_per_second": statistics.median(speeds),
            "spread": (max(speeds) - min(speeds)) / statistics.median(speeds),
            "peak_bytes": peak_bytes(self._device),
            "loss": largest(float(loss) / ranks, self._device),
            **norms,
        }

    def _step(self, tokens: Tensor) -> None:
        self._backward(tokens)
        self._update()

    def _backward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self._model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.detach().float()

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _gradient_norms(self) -> dict[str, float]:
        """Return the norms of the gradients of experts and of everything else, over all ranks."""
        squares = {"expert_gradient_norm": 0.0, "other_gradient_norm": 0.0}
        for name, parameter in self._model.named_parameters():
            norm: Any = parameter.grad.float().norm()
            whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            squares["expert_gradient_norm" if ".experts." in name else "other_gradient_norm"] += float(whole) ** 2
        return {name: square**0.5 for name, square in squares.items()}


class Loaded:
    """The contender that is loaded: one at a time, so that peaks are its own."""

    def __init__(self, folder: Path, device: torch.device, length: int) -> None:
        self._place = (folder, device, length)
        self._name = ""
        self._contender: Contender | None = None

    def measure(self, name: str, size: int) -> Row:
        """Return the figures of a contender."""
        if self._name != name:
            self._contender = None
            gc.collect()
            if self._place[1].type == "cuda":
                torch.cuda.empty_cache()
            self._contender, self._name = Contender(name, *self._place), name
        assert self._contender is not None
        return self._contender.measure(size)


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Return the speed and the peak of each contender over those of `sharded` with as many sequences."""
    plain = {(row["model"], row["size"]): row for row in rows if row["contender"] == "sharded" and "loss" in row}
    summary: list[Row] = []
    for row in rows:
        base = plain.get((row["model"], row["size"]))
        if base is None or "loss" not in row:
            continue
        found = {name: row[name] for name in ("model", "size", "contender")}
        peak = base["peak_bytes"] and row["peak_bytes"] / base["peak_bytes"]
        speed = row["tokens_per_second"] / base["tokens_per_second"]
        summary.append({**found, "speed": speed, "peak": peak, "loss": row["loss"] - base["loss"]})
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("expert_sharding", __doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args(arguments)
    device = join_ranks(options.device)
    length = TINY_LENGTH if options.tiny else LENGTH
    rows = Rows(options.out, device, options.until, summarize, commit=describe_commit(), seq_length=length)
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as own:
            folder = Path(rows.same([own]))
            save({**config, **(TINY if options.tiny else {})}, folder, device)
            loaded = Loaded(folder, device, length)
            for contender in CONTENDERS:
                for size in options.sizes:
                    rows.measure(partial(loaded.measure, contender, size), model=name, contender=contender, size=size)
            dist.barrier()  # before the first rank removes its folder
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
