"""Tiny models of transformers, in float32 on the host, and one training step of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": _COMMON,
    "qwen3": {**_COMMON, "head_dim": 8},
    "olmoe": {**_COMMON, **_EXPERTS},
    "qwen3_moe": {**_COMMON, **_EXPERTS, "moe_intermediate_size": 24, "head_dim": 8},
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "gemma2": {**_COMMON, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gpt_oss": {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6},
}
MIXTURES = ("olmoe", "qwen3_moe")


def tiny(model_type: str, **changed: Any) -> Any:
    """A model with random weights, the same for each call, in training mode."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds, in each process that collects tests

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**CONFIGURATIONS[model_type], **changed})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.train()


def batch(size: int = 4, length: int = 12, *, padded: bool = False) -> dict[str, Tensor]:
    """Random tokens; some labels are ignored. With `padded` two sequences end early."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (size, length), generator=generator)
    labels = tokens.clone()
    labels[0, :5] = -100
    found = {"input_ids": tokens, "labels": labels}
    if padded:
        mask = torch.ones_like(tokens)
        mask[1, 7:] = 0
        mask[2, 9:] = 0
        found["attention_mask"] = mask
        labels[mask == 0] = -100
    return found


@dataclass
class Step:
    """The loss and the gradients by name."""

    loss: Tensor
    gradients: dict[str, Tensor]


def step(model: nn.Module, inputs: dict[str, Tensor], **kwargs: Any) -> Step:
    """One forward and backward."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs, **kwargs).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Step(loss.detach(), gradients)


def assert_same(actual: Step, wanted: Step) -> None:
    """The loss and every gradient agree, relative to the size of the gradient."""
    tolerance = 2e-5
    assert abs(float(actual.loss - wanted.loss)) <= tolerance * float(wanted.loss)
    assert actual.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        error = float((actual.gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-12))
        assert error <= tolerance, f"{name}: {error}"


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that set_up may change, by the path of its owner."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith(("_forward", "_backward", "_state_dict", "_load_state")):
                found[f"{path}.{name}"] = value if isinstance(value, bool | int | str | float) else id(value)
    config = model.config
    for name in ("_attn_implementation", "_experts_implementation", "use_cache"):
        found[f"config.{name}"] = getattr(config, name, None)
    return found
