"""Two processes that share the sequences of transformers' models, and write how far they are from one with all."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import bexp
from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.kernels.context_parallel.layouts import LAYOUTS
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings
from tests.bexp.kernels.rank_groups import join_groups, refusals_of
from tests.bexp.trainer.recommendations import document
from tests.bexp.transformers import models
from tests.bexp.transformers.ranks import sharded, whole
from tests.forked_ranks import SHARDING, fork_ranks

NUM_RANKS = 2
MODELS = ("llama", "qwen3", "gpt2", "olmoe", "qwen3_moe")
SETTINGS = {
    "plain": Settings(),
    "layers, chunks and tiles": Settings(recompute="full", loss="chunked", bta_tile=3),
    "selective": Settings(attention="sdpa:math", recompute="selective"),
    "operations": Settings(recompute="activations", attention="sdpa"),
    "compiled": Settings(compile=True),
}
SET_ONCE = ("qwen3", "zigzag")
"""The model and the layout that have all settings."""


def model_of(model_type: str, **changed: Any) -> Any:
    """In float64, for which `grouped_mm` has no kernel."""
    model = models.tiny(model_type, **changed).double()
    if model_type in models.MIXTURES:
        set_up(model, Settings(experts="eager"))
    return model


def errors(model: Any, wanted: models.Step, batch: dict[str, Any], **kwargs: Any) -> dict[str, float]:
    """The errors of the loss, and of the worst gradient as DDP would make it of all ranks'."""
    found = models.step(model, batch, **kwargs)
    of_gradients = []
    for name, gradient in found.gradients.items():
        dist.all_reduce(gradient)
        right = wanted.gradients[name]
        of_gradients.append(float((gradient / NUM_RANKS - right).norm() / right.norm()))
    assert len(of_gradients) == len(wanted.gradients)
    return {"loss": float(abs(found.loss - wanted.loss) / wanted.loss), "gradients": max(of_gradients)}


def compare(contexts: Mapping[str, ContextParallel]) -> dict[str, dict[str, float]]:
    """The errors by model, layout and settings."""
    found: dict[str, dict[str, float]] = {}
    batch = models.batch()
    for model_type in MODELS:
        model = model_of(model_type)
        wanted = models.step(model, batch)
        before = models.snapshot(model)
        for layout, context in contexts.items():
            for name, settings in SETTINGS.items():
                if name != "plain" and (model_type, layout) != SET_ONCE:
                    continue
                applied = set_up(model, settings, chunk=7, context_parallel=context)
                found[f"{model_type}, {layout}, {name}"] = errors(model, wanted, batch)
                applied.undo()
                assert settings.compile or models.snapshot(model) == before
    return found


def compare_uses(context: ContextParallel) -> dict[str, dict[str, float]]:
    """The errors of other ways to call and to wrap a model."""
    batch = models.batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    model = model_of("llama")
    wanted = models.step(model, batch, num_items_in_batch=100)
    logits = model(**batch).logits.detach()
    set_up(model, Settings(), context_parallel=context)
    found = {"items of a step": errors(model, wanted, batch, num_items_in_batch=100)}
    targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    shifted = {"input_ids": batch["input_ids"], "labels": batch["labels"], "shift_labels": targets}
    found["targets"] = errors(copy.deepcopy(model), wanted, shifted, num_items_in_batch=100)
    with torch.no_grad():
        part = model(batch["input_ids"]).logits
    found["logits"] = {"out": float((context.gather(part) - logits).norm() / logits.norm())}
    model = models.tiny("olmoe")
    wanted = models.step(model, batch)
    bexp.apply(model, document(attention_backend="own", expert_backend=None), context_parallel=context)
    found["own code"] = errors(model, wanted, batch)
    assert bexp.restore(model)
    shared = document(context_parallel_size=NUM_RANKS, context_parallel_layout=context.layout.name)
    report = bexp.apply(model, shared, context_parallel=context)
    assert not any("devices share" in warning for warning in report.warnings)
    wrapped = sharded(model)
    wrapped(**batch).loss.backward()
    pairs = ((whole(p.grad), wanted.gradients[name]) for name, p in model.named_parameters())
    found["fully_shard"] = {"gradients": max(float((ours - right).norm() / right.norm()) for ours, right in pairs)}
    return found


def refusals(context: ContextParallel, rank: int) -> dict[str, str]:
    """What is said where sequences cannot be shared."""
    batch = models.batch()

    def train(inputs: dict[str, Any], model_type: str = "llama", **changed: Any) -> Callable[[], object]:
        def run() -> object:
            model = models.tiny(model_type, **changed)
            set_up(model, Settings(), context_parallel=context)
            return model(**inputs)

        return run

    def apply(settings: Settings, model_type: str = "llama", **changed: Any) -> Callable[[], object]:
        return lambda: set_up(models.tiny(model_type, **changed), settings, context_parallel=context)

    other = {name: value + (rank if name == "input_ids" else 0) for name, value in batch.items()}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    calls = {
        "padding": train(models.batch(padded=True)),
        "positions": train({**batch, "position_ids": torch.arange(12)[None]}),
        "no tokens": train({"labels": batch["labels"]}),
        "length": train(models.batch(length=13)),
        "batches": train(other),
        "window": train(batch, "mistral", sliding_window=4),
        "dropout": train(batch, attention_dropout=0.1),
        "graphs": apply(Settings(graph=True)),
        "attention": apply(Settings(attention="eager")),
        "windows": apply(Settings(), "gemma2"),
        "rotation": apply(Settings(), rope_parameters=rope),
        "routers": apply(Settings(), "olmoe", output_router_logits=True),
        "recommended": lambda: bexp.apply(
            models.tiny("olmoe"), document(context_parallel_size=2, context_parallel_layout="ring")
        ),
        "strict": lambda: bexp.apply(models.tiny("olmoe"), document(), context_parallel=context, strict=True),
    }
    return refusals_of(calls)


def run(folder: Path, rank: int) -> None:
    """Share sequences as one of the ranks."""
    nn.Module.compile = partialmethod(nn.Module.compile, backend="aot_eager")  # type: ignore[method-assign,assignment]
    group = join_groups(folder, rank, NUM_RANKS, (NUM_RANKS,))[NUM_RANKS]
    contexts = {layout: ContextParallel(group, layout) for layout in LAYOUTS}
    found = {
        "errors": compare(contexts),
        "uses": compare_uses(contexts["striped"]),
        "refusals": refusals(contexts["zigzag"], rank),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    shared = (*SHARDING, "transformers")
    sys.exit(fork_ranks(partial(run, Path(sys.argv[1])), NUM_RANKS, shared=shared))
