"""Whole training steps of a transformers model whose sequences several devices share: ours next to torch's own.

    torchrun --nproc-per-node 2 -m benchmarks.long_contexts --out benchmarks/results/NAME.json
    torchrun --nproc-per-node 4 -m benchmarks.long_contexts --seq-lengths 786432 --recompute --no-warm-up --out FILE
    torchrun --nproc-per-node 2 -m benchmarks.long_contexts --tiny --device cpu --out FILE

The model is a Llama of 8 layers with the widths of Llama-3.2-1B, in bfloat16, with AdamW and the loss in chunks; every
rank holds all of it. With `--recompute`, each layer is recomputed in the backward. `ring`, `zigzag` and `striped` are
what `bexp.apply` sets up with `context_parallel`. `torch` is torch.distributed.tensor.experimental.context_parallel,
which rotates keys by all-gather, its default, or by all-to-all. `flash` and `cudnn` name the kernel of attention in all
of them.

A step is forward, backward, the mean of the gradients over the ranks, and the optimizer. Contenders take turns; seconds
are those of the slowest rank, and peaks those of the fullest. With `--no-warm-up`, the first step at a length is timed
after a short one alone: of steps that take a minute.

`gradients` are of two layers, at a length that fits one device: the distance of each contender's to one device's in
float32, relative to their norm; `alone` is one device in bfloat16. Of each the whole and the worst parameter are given.
A contender that is wrong is not timed.
A row that fails has its error. A second start goes on after the row that ended the first.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.environment import describe_commit
from benchmarks.rank_runs import Row, Rows, join_ranks, largest, parser_of, peak_bytes, slowest_seconds
from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.kernels.context_parallel.ring import ring_group
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings

SIZES: dict[str, Any] = {
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"head_dim": 64, "vocab_size": 128_256, "tie_word_embeddings": True, "max_position_embeddings": 1 << 20},
}
TINY: dict[str, Any] = SIZES | {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 16, "vocab_size": 512},
}
NUM_LAYERS = 8
LENGTHS = (65_536, 131_072)
SHORT = 8192
"""Of gradients, and of a first step that loads kernels."""
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
IGNORED = -100

Step = Callable[[Tensor], Tensor]
"""Forward and backward of tokens (1, S); returns the loss."""
Contender = Callable[[Any, str], AbstractContextManager[Step]]
"""What sets a model up, with what it recomputes, for the time of its steps."""


@contextmanager
def set_up_for(model: Any, attention: str, recompute: str, layout: str | None = None) -> Iterator[Any]:
    """Set a model up for the time of a contender, with a layout if ranks share its sequences."""
    context = None if layout is None else ContextParallel(_group(), layout)
    settings = Settings(loss="chunked", attention=attention, recompute=recompute)
    applied = set_up(model, settings, context_parallel=context)
    try:
        yield model
    finally:
        applied.undo()
        model.zero_grad(set_to_none=True)


@functools.cache
def _group() -> dist.ProcessGroup:
    """Return one group for all turns: a new one would begin with the making of its communicator."""
    return ring_group()


def ours(kernel: str, layout: str | None) -> Contender:
    """Return the contender that shares sequences by our layout; None: each rank computes whole sequences."""

    @contextmanager
    def prepare(model: Any, recompute: str) -> Iterator[Step]:
        with set_up_for(model, f"sdpa:{kernel}", recompute, layout):
            yield partial(_whole_step, model)

    return prepare


def _whole_step(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def by_torch(kernel: str, rotation: str, *, repeated: bool = False) -> Contender:
    """Return the contender that shares sequences by torch's context parallelism, with `repeated` keys or grouped."""

    @contextmanager
    def prepare(model: Any, recompute: str) -> Iterator[Step]:
        from torch.distributed.tensor.experimental import _attention  # noqa: PLC0415 - the other contenders need none
        from transformers import AttentionInterface  # noqa: PLC0415 - likewise

        _attention.set_rotate_method(rotation)
        attention = partial(_causal_attention, repeated)
        AttentionInterface.register("benchmark_sdpa", attention)  # a name without masks, which would be S x S
        mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
        with set_up_for(model, "benchmark_sdpa", recompute):
            yield partial(_torch_step, model, mesh, KERNELS[kernel])

    return prepare


def _torch_step(model: Any, mesh: Any, kernel: SDPBackend, tokens: Tensor) -> Tensor:
    from torch.distributed.tensor.experimental import context_parallel  # noqa: PLC0415 - the others need none

    inputs, targets = tokens.clone(), F.pad(tokens, (0, 1), value=IGNORED)[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    share = (tokens.shape[1] - 1) / dist.get_world_size()
    with context_parallel(mesh, buffers=[inputs, positions, targets], buffer_seq_dims=[1, 1, 1]), sdpa_kernel(kernel):
        given = {"labels": targets, "shift_labels": targets, "num_items_in_batch": share}
        loss: Tensor = model(input_ids=inputs, position_ids=positions, **given).loss
        loss.backward()
    return loss.detach()


def _causal_attention(
    repeated: bool,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention by SDPA, as transformers calls it."""
    if repeated:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=not repeated)
    return out.transpose(1, 2), None


REPEATED = ", keys repeated"
CONTENDERS: dict[str, Contender] = {
    "zigzag, flash": ours("flash", "zigzag"),
    "torch by all-gather, flash": by_torch("flash", "allgather"),
    "torch by all-gather, flash" + REPEATED: by_torch("flash", "allgather", repeated=True),
    "striped, flash": ours("flash", "striped"),
    "ring, flash": ours("flash", "ring"),
    "torch by all-to-all, flash": by_torch("flash", "alltoall"),
    "torch by all-to-all, flash" + REPEATED: by_torch("flash", "alltoall", repeated=True),
    "zigzag, cudnn": ours("cudnn", "zigzag"),
    "striped, cudnn": ours("cudnn", "striped"),
    "ring, cudnn": ours("cudnn", "ring"),
    "torch by all-gather, cudnn": by_torch("cudnn", "allgather"),
    "torch by all-gather, cudnn" + REPEATED: by_torch("cudnn", "allgather", repeated=True),
}
"""torch repeats keys where it does not compute right with grouped ones; there each exchange has as many more bytes."""
MOST_ERROR = 0.1
"""Contenders whose gradients are further off are not timed."""


def choose(errors: Mapping[str, float | None]) -> list[str]:
    """Return the contenders to time, of those whose error of all gradients is known."""
    right = [name for name, error in errors.items() if error is not None and error <= MOST_ERROR]
    return [name for name in right if not (name.endswith(REPEATED) and name.removesuffix(REPEATED) in right)]


def build(options: argparse.Namespace, num_layers: int, device: torch.device) -> Any:
    """Return the model with the same random weights on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - takes seconds

    torch.manual_seed(0)
    config = LlamaConfig(**(TINY if options.tiny else SIZES), num_hidden_layers=num_layers)
    with device:
        model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).train()


def tokens_of(seq_length: int, vocabulary: int, device: torch.device) -> Tensor:
    """Return random tokens (1, S), the same on all ranks."""
    generator = torch.Generator().manual_seed(seq_length)
    return torch.randint(vocabulary, (1, seq_length), generator=generator).to(device)


def reduce_gradients(model: Any) -> None:
    """Make each gradient the mean of the ranks'."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


class Bench:
    """The model, and what its contenders take turns in."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.device, self.short, self.warms_up = device, options.short, options.warm_up
        self.recompute = options.recompute
        self.model = build(options, options.layers, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self._warm: set[tuple[str, int]] = set()

    def turn(self, contender: str, seq_length: int) -> Row:
        """Return the figures of a step of a contender. Its first turn at a length begins with untimed steps."""
        vocabulary = self.model.config.vocab_size
        tokens = tokens_of(seq_length, vocabulary, self.device)
        with CONTENDERS[contender](self.model, self.recompute) as step:
            if (contender, seq_length) not in self._warm:
                self._step(step, tokens_of(self.short, vocabulary, self.device))
                if self.warms_up:
                    self._step(step, tokens)
                self._warm.add((contender, seq_length))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)
            losses: list[Tensor] = []
            seconds = slowest_seconds(lambda: losses.append(self._step(step, tokens)), self.device)
        loss = largest(float(losses[0]), self.device)
        return {"tokens_per_second": seq_length / seconds, "peak_bytes": peak_bytes(self.device), "loss": loss}

    def _step(self, step: Step, tokens: Tensor) -> Tensor:
        loss = step(tokens)
        reduce_gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


class Gradients:
    """The gradients of a model of two layers in float32 on one device, and how far a contender's are from them."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._model = build(options, 2, device)
        self._recompute = options.recompute
        self._tokens = tokens_of(options.short, self._model.config.vocab_size, device)
        self._right: list[Tensor] = []

    def error(self, contender: Contender) -> Row:
        """Return the errors of all gradients and of the worst parameter's."""
        if not self._right:
            self._right = self._of_one_device()
        with contender(self._model, self._recompute) as step:
            step(self._tokens)
            reduce_gradients(self._model)
            found = [parameter.grad.double() for parameter in self._model.parameters()]
        off = torch.stack([(one - right).norm() for one, right in zip(found, self._right, strict=True)])
        norms = torch.stack([right.norm() for right in self._right])
        return {"gradient_error": float(off.norm() / norms.norm()), "worst_gradient_error": float((off / norms).max())}

    def _of_one_device(self) -> list[Tensor]:
        longer = torch.float32 if self._model.dtype is torch.bfloat16 else torch.float64
        precise = copy.deepcopy(self._model).to(longer)
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            _whole_step(precise, self._tokens)
        return [parameter.grad.double() for parameter in precise.parameters()]


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Return the medians of each contender's turns at a length, with their spread, and the speed over torch's best."""
    turns: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        if "tokens_per_second" in row:
            turns.setdefault((row["seq_length"], row["contender"]), []).append(row)
    summary: list[Row] = []
    for (seq_length, contender), of_one in turns.items():
        speeds = [row["tokens_per_second"] for row in of_one]
        median = statistics.median(speeds)
        figures = {"tokens_per_second": median, "spread": (max(speeds) - min(speeds)) / median}
        peak = max((row["peak_bytes"] or 0 for row in of_one), default=0)
        summary.append({"seq_length": seq_length, "contender": contender, **figures, "peak_bytes": peak or None})
    for row in summary:
        others = [o for o in summary if o["contender"].startswith("torch") and o["seq_length"] == row["seq_length"]]
        best = max((other["tokens_per_second"] for other in others), default=None)
        row["over_torch"] = best and row["tokens_per_second"] / best
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("long_contexts", __doc__)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--recompute", action="store_const", const="full", default="none", help="every layer")
    parser.add_argument("--no-warm-up", action="store_false", dest="warm_up", help="no untimed step of a length")
    parser.add_argument("--short", type=int, default=SHORT)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    options = parser.parse_args(arguments)
    device = join_ranks(options.device)
    setting = {
        "commit": describe_commit(),
        "layers": options.layers,
        "recompute": options.recompute,
        "warm_up": options.warm_up,
        "sizes": TINY if options.tiny else SIZES,
    }
    rows = Rows(options.out, device, options.until, summarize, **setting)
    chosen = {name: CONTENDERS[name] for name in options.contenders}
    gradients = Gradients(options, device)
    found = {
        name: rows.measure(partial(gradients.error, contender), contender=name, gradients_of=options.short)
        for name, contender in {"alone, flash": ours("flash", None), **chosen}.items()
    }
    names = rows.same([choose({name: found[name].get("gradient_error") for name in chosen})])
    del gradients
    bench = Bench(options, device)
    for seq_length in options.seq_lengths:
        for turn in range(options.rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                rows.measure(partial(bench.turn, name, seq_length), contender=name, seq_length=seq_length, turn=turn)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
