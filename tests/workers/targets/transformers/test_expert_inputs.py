from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bexp.transformers.experts import expert_modules
from bexp.workers.targets.transformers import builder as building
from bexp.workers.targets.transformers.builder import PartsBuilder
from bexp.workers.targets.transformers.config import quiet_library
from bexp.workers.targets.transformers.model import BuildSettings, build_model
from bexp.workers.targets.transformers.resolved import ResolvedModel, resolve

pytest.importorskip("transformers")

CPU = torch.device("cpu")
COMMON = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 2},
    "deepseek_v2": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
    "gpt_oss": {"num_local_experts": 16, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 64},
}


def _resolved(model_type: str) -> ResolvedModel:
    config = {"model_type": model_type, **COMMON, **CONFIGS[model_type]}
    return resolve(config, 128, settings=BuildSettings(dtype=torch.float32))


@pytest.mark.parametrize("model_type", ["deepseek_v2", "gpt_oss"])
def test_a_layer_alone_spreads_tokens_over_experts_as_the_layers_of_its_model_do(model_type: str) -> None:
    resolved = _resolved(model_type)
    builder = resolved.builder(CPU)
    model = build_model(builder.resolved, builder.settings, CPU)
    with _busiest(model) as whole, torch.no_grad(), quiet_library():
        model(**builder.batch(2), use_cache=False)
    typical = statistics.median(whole)
    kinds = [kind for kind in dict.fromkeys(resolved.kinds) if expert_modules(builder.layer(kind, 2).module)]
    assert kinds, "the model has experts"
    for kind in kinds:
        assert _busiest_of_part(builder, kind) == pytest.approx(typical, rel=0.35)
        index = resolved.kinds.index(kind)
        with _busiest(builder.skeleton.layers[index]) as of_embedding, torch.no_grad():
            call = builder.skeleton.call(builder.batch(2), index)
            builder.skeleton.layers[index](*call.args, **call.kwargs)
        assert of_embedding[0] < 0.75 * typical


def test_sequences_of_a_micro_batch_differ_until_they_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "MOST_SEQUENCES", 2)
    resolved = _resolved("olmoe")
    builder = resolved.builder(CPU)
    hidden = builder.layer(resolved.kinds[0], 3).hidden
    assert hidden.shape == (3, 128, 128)
    assert hidden.requires_grad
    assert not torch.equal(hidden[0], hidden[1])
    assert torch.equal(hidden[0], hidden[2])
    assert torch.equal(hidden[:1], builder.layer(resolved.kinds[0], 1).hidden)


def test_no_layer_beyond_the_deepest_is_run_for_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "DEEPEST_LAYER", 1)
    resolved = _resolved("olmoe")
    builder = resolved.builder(CPU)
    embedding = builder.skeleton.model.get_input_embeddings()
    hidden = builder.layer(resolved.kinds[0], 1).hidden
    known = {tuple(row) for row in embedding.weight.tolist()}
    assert tuple(hidden[0, 0].tolist()) in known


def test_a_layer_without_experts_gets_the_embeddings_output() -> None:
    resolved = _resolved("deepseek_v2")
    builder = resolved.builder(CPU)
    part = builder.layer(resolved.kinds[0], 2)
    assert not expert_modules(part.module)
    tokens = builder.batch(2)["input_ids"]
    assert torch.equal(part.hidden, builder.skeleton.model.get_input_embeddings()(tokens))


def _busiest_of_part(builder: PartsBuilder, kind: str) -> float:
    part = builder.layer(kind, 2)
    with _busiest(part.module) as found:
        part.forward_all()
    return found[0]


@contextmanager
def _busiest(module: nn.Module) -> Iterator[list[float]]:
    """For each call of experts inside the context, the share of tokens that the busiest expert gets."""
    shares: list[float] = []

    def record(_: nn.Module, args: tuple[Any, ...]) -> None:
        routes: Tensor = args[1]
        shares.append(float(routes.flatten().bincount().max() / routes.numel()))

    hooks = [experts.register_forward_pre_hook(record) for experts in expert_modules(module)]
    try:
        yield shares
    finally:
        for hook in hooks:
            hook.remove()
