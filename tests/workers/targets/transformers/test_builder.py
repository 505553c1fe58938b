from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bexp.explorer.cost.text_batches import TextBatch
from bexp.transformers.experts import expert_modules
from bexp.workers.targets.transformers import builder as building
from bexp.workers.targets.transformers.builder import PartsBuilder
from bexp.workers.targets.transformers.config import (
    UnsupportedModelError,
    library_version,
    quiet_library,
    resolve_config,
)
from bexp.workers.targets.transformers.model import BuildSettings, build_model
from bexp.workers.targets.transformers.resolved import ResolvedModel, resolve
from bexp.workers.targets.transformers.target import describe_parts

pytest.importorskip("transformers")

CPU = torch.device("cpu")
SLIDING = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 160,
    "sliding_window": 8,
}


@pytest.fixture(scope="module")
def resolved() -> ResolvedModel:
    return resolve(SLIDING, 24)


def test_layers_that_differ_by_their_mask_alone_are_different_kinds(resolved: ResolvedModel) -> None:
    sliding, full = "Gemma3DecoderLayer[sliding_attention]", "Gemma3DecoderLayer[full_attention]"
    assert resolved.kinds == (sliding, sliding, full)
    builder = resolved.builder(CPU)
    mask = builder.layer(sliding, 2).kwargs["attention_mask"]
    assert mask.sum() < 2 * 24 * 25 / 2  # the window hides what a causal mask shows


def test_parts_hold_every_parameter_of_the_model_once(resolved: ResolvedModel) -> None:
    parts = describe_parts(resolved, tiles=None, checkpointing=None, named={})
    inside = sum(parts.layers.count(kind.name) * kind.num_parameters for kind in parts.kinds)
    whole = build_model(resolved.config, resolved.settings, CPU)
    assert inside + parts.shell.num_parameters == parts.num_parameters == sum(p.numel() for p in whole.parameters())
    assert resolved.check.by_parts


@pytest.mark.parametrize(("precision", "dtype"), [("pure", torch.bfloat16), ("autocast", torch.float32)])
def test_a_layer_and_the_shell_run_both_passes(resolved: ResolvedModel, precision: str, dtype: torch.dtype) -> None:
    settings = BuildSettings(precision="pure" if precision == "pure" else "autocast")
    builder = resolved.builder(CPU, settings)
    texts = TextBatch(((24,), (12,), (20,)), 24)
    part = builder.layer(resolved.kinds[0], texts)
    part.backward(part.forward())
    assert part.hidden.shape == (3, 24, 64)
    assert part.hidden.grad is not None
    assert all(p.dtype == dtype and p.grad is not None and p.grad.isfinite().all() for p in part.module.parameters())
    part.clear_gradients()
    assert part.hidden.grad is None
    shell = builder.shell(texts)
    loss = shell.forward()
    loss.backward()
    assert loss.isfinite()
    assert shell.model.get_input_embeddings().weight.grad is not None


def test_preparation_reaches_every_model_that_is_built() -> None:
    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("self_attn" in name)

    resolved = resolve(SLIDING, 24, settings=BuildSettings(prepare=freeze))
    assert 0 < resolved.layer_parts[0].trainable_bytes < resolved.layer_parts[0].parameter_bytes
    part = resolved.builder(CPU).layer(resolved.kinds[0], 1)
    part.backward(part.forward())
    assert {name.split(".")[0] for name, p in part.module.named_parameters() if p.grad is not None} == {"self_attn"}


def test_no_values_are_drawn_for_layers_that_are_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    initialization = import_module("transformers.initialization")
    drawn: list[torch.device] = []
    draw: Callable[..., Tensor] = initialization.normal_

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        drawn.append(tensor.device)
        return draw(tensor, *args, **kwargs)

    monkeypatch.setattr(initialization, "normal_", noted)
    layer = resolve(SLIDING, 24).builder(CPU).layer("Gemma3DecoderLayer[full_attention]", 1)
    assert set(drawn) == {CPU}
    assert all(parameter.std() > 0 for name, parameter in layer.module.named_parameters() if "proj" in name)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash_attn is installed")
def test_an_attention_package_that_is_missing_is_left_out_with_the_reason(resolved: ResolvedModel) -> None:
    found = resolved.attention_implementations
    assert found["sdpa"] is None
    assert "flash" in (found["flash_attention_2"] or "").lower()


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "code.Model"}}, "never run"),
        ({"model_type": "llama", "trust_remote_code": True}, "never run"),
        ({"model_type": "llama", "attn_implementation": "owner/kernels@main"}, "nothing is fetched"),
        ({}, "model_type: must name"),
        ({"model_type": "no_such_model"}, "unknown to the library; a target of your own measures it whole"),
        ({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}, "write that instead"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "llama", "num_hidden_layers": 513}, "num_hidden_layers: must be a number from -512 to 512"),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba"] * 513}, "has 513 items; at most 512"),
        ({"model_type": "longcat_flash", "num_layers": 300}, "600 layers; at most 512"),
        ({"model_type": "llama", "to_dict": 1}, "to_dict is a method of LlamaConfig"),
        ({"model_type": "llama", "hidden_size": "wide"}, "refused"),
    ],
)
def test_a_configuration_that_cannot_be_built_is_refused_with_the_version(raw: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        resolve_config(raw, 128)
    assert str(library_version()) in str(refusal.value)


def test_positions_of_padding_hold_no_token() -> None:
    roberta = {"model_type": "roberta", "is_decoder": True, "hidden_size": 32, "num_hidden_layers": 1}
    roberta |= {"num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 66}
    assert resolve(roberta, 64).config.seq_length == 64
    with pytest.raises(UnsupportedModelError, match="longer than max_position_embeddings 66 less 2 that no token has"):
        resolve(roberta, 65)


def test_a_table_of_positions_bounds_the_sequence_and_rotary_positions_do_not() -> None:
    with pytest.raises(UnsupportedModelError, match="longer than max_position_embeddings 64"):
        resolve(GPT2, 65)
    rotary = {"model_type": "llama", "max_position_embeddings": 64, "hidden_size": 64, "num_attention_heads": 4}
    resolved = resolve({**rotary, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 128}, 65)
    assert resolved.config.seq_length == 65


def test_quantization_is_left_out() -> None:
    config = resolve_config({**GPT2, "quantization_config": {"quant_method": "fp8"}}, 64)
    assert getattr(config.config, "quantization_config", None) is None
    assert not config.config.use_cache


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
