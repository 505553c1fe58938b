"""Models of Hugging Face transformers' own classes, built from a `ModelSpec` and timed as training steps.

Written for transformers 4.57 and 5; it is imported when a function is called, since nothing else here needs it.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.isolation import Spoilt
from bexp.explorer.spec.model import ModelSpec
from bexp.explorer.spec.routing import RoutingSpec
from bexp.measure.timing import collector_paused, standard_error
from bexp.workers.profiler.training.data_parallel import MICRO_STEPS
from bexp.workers.profiler.trials.whole_model import MAX_STEPS, MIN_STEPS, TIMED_SECONDS
from bexp.workers.targets.reference.decoder import parameter_shapes
from bexp.workers.targets.reference.factory import random_tokens
from bexp.workers.targets.reference.routes import device_routes
from bexp.workers.targets.reference.shapes import torch_dtype

EXPERTS = "grouped_mm"
"""Asked of versions that have a choice; the others loop over their experts."""
LEARNING_RATE = 0.0  # the same work, and weights that stay as they are
NOT_ROUTED = -30.0
"""Added to the logit of an expert that a token must not take; bf16 keeps it apart from any logit of random weights."""
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def config_of(model: ModelSpec) -> tuple[type[Any], Any]:
    """The class and the configuration that amount to `model`, with SDPA attention and no cache.

    Raises:
        ValueError: neither LlamaForCausalLM nor OlmoeForCausalLM is this model.
    """
    _check_family(model)
    transformers: Any = import_module("transformers")
    common: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "max_position_embeddings": model.seq_length,
        "attention_bias": model.qkv_bias,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": model.activation,
        "use_cache": False,
        "attn_implementation": "sdpa",
        **NO_TOKENS,
    }
    if model.moe is None:
        return transformers.LlamaForCausalLM, transformers.LlamaConfig(
            **common, intermediate_size=model.ffn_hidden_size, head_dim=model.head_size, mlp_bias=model.mlp_bias
        )
    return transformers.OlmoeForCausalLM, transformers.OlmoeConfig(
        **common,
        intermediate_size=model.moe.expert_ffn_hidden_size,
        num_experts=model.moe.num_experts,
        num_experts_per_tok=model.moe.top_k,
        norm_topk_prob=model.moe.norm_topk_prob,
        clip_qkv=None,
        experts_implementation=EXPERTS,
    )


def _check_family(model: ModelSpec) -> None:
    wanted: dict[str, Any] = {
        "norm": "rmsnorm",
        "position": "rope",
        "rotary_fraction": 1.0,
        "gated_mlp": True,
        "attention_output_bias": model.qkv_bias,
        "qk_norm": "none" if model.moe is None else "full",
        "parallel_residual": False,
        "lm_head_bias": False,
    }
    wrong = [name for name, value in wanted.items() if getattr(model, name) != value]
    if model.moe is not None:
        moe = model.moe
        wrong += ["moe.shared_expert_ffn_hidden_size"] if moe.shared_expert_ffn_hidden_size else []
        wrong += ["moe.first_k_dense"] if moe.first_k_dense else []
        wrong += ["moe.moe_layer_frequency"] if moe.moe_layer_frequency != 1 else []
        wrong += ["head_dim"] if model.head_size * model.num_attention_heads != model.hidden_size else []
    if wrong:
        family = "Llama" if model.moe is None else "OLMoE"
        raise ValueError(f"{model.name} is no {family} model: {', '.join(wrong)}")


def build(model: ModelSpec, device: torch.device) -> nn.Module:
    """The model with transformers' own random weights, in training mode.

    Raises:
        ValueError: there is no class for it, or its number of parameters is not that of `model`.
    """
    kind, config = config_of(model)
    with _default_dtype(torch_dtype(model.dtype)), device:
        built: nn.Module = kind(config)
    found = sum(parameter.numel() for parameter in built.parameters())
    wanted = sum(shape.numel() for shape in parameter_shapes(model))
    if found != wanted:
        raise ValueError(f"{kind.__name__} has {found} parameters, {model.name} as it is explored {wanted}")
    return built.train()


def time_training(
    model: ModelSpec, micro_batch_size: int, device_name: str, routing: RoutingSpec, seed: int
) -> dict[str, Any] | Spoilt:
    """Train a few steps of accumulated micro-steps, as whole-model trials do, and time them back to back.

    Seconds are medians, of a micro-step (forward, loss, backward) and of an optimizer step (torch's fused AdamW on
    parameters, gradients and moments in the model's dtype, and the zeroing of the gradients). Experts
    get the tokens that `routing` and `seed` give them in the product's models. `own_imbalance` is what the random
    routers do when left alone: tokens of the busiest expert over the mean, averaged over the layers.

    Raises:
        ValueError: as `build`.
    """
    device = torch.device(device_name)
    torch.manual_seed(seed)
    try:
        return {"outcome": "ok", **_Training(model, micro_batch_size, device, routing, seed).time()}
    except torch.OutOfMemoryError as error:
        return Spoilt({"outcome": "out_of_memory", "reason": str(error).partition("\n")[0]})
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


class _Training:
    def __init__(
        self, model: ModelSpec, micro_batch_size: int, device: torch.device, routing: RoutingSpec, seed: int
    ) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._model = build(model, device)
        self._routes: Tensor | None = None
        if model.moe is not None:
            self._routes = device_routes(model, routing, micro_batch_size * model.seq_length, seed, device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, fused=True)
        shape = (micro_batch_size, model.seq_length)
        self._batches = [random_tokens(model, shape, device) for _ in range(MICRO_STEPS)]

    def time(self) -> dict[str, Any]:
        with expert_loads(self._model) as loads:
            loss = self._step()[-1].item()
        if not math.isfinite(loss):
            raise ValueError(f"the loss of {type(self._model).__name__} is {loss}")
        if self._routes is not None:
            impose_routes(self._model, self._routes)
        self._step()
        self._synchronize()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        started = time.perf_counter()
        self._step()
        self._synchronize()
        once = time.perf_counter() - started
        num_steps = max(MIN_STEPS, min(MAX_STEPS, int(TIMED_SECONDS / once)))
        with collector_paused():
            marks = [self._step()[:-1] for _ in range(num_steps)]
            self._synchronize()
        micro_steps = [_seconds(start, before) / MICRO_STEPS for start, before, _ in marks]
        optimizer = [_seconds(before, end) for _, before, end in marks]
        config: Any = self._model.config
        return {
            "class": type(self._model).__name__,
            "attention": config._attn_implementation,
            "experts": (getattr(config, "_experts_implementation", None) or "eager")
            if self._routes is not None
            else None,
            "own_imbalance": statistics.fmean(loads) if loads else None,
            "num_parameters": sum(parameter.numel() for parameter in self._model.parameters()),
            "loss": loss,
            "micro_step_seconds": statistics.median(micro_steps),
            "optimizer_seconds": statistics.median(optimizer),
            "standard_error_seconds": standard_error(micro_steps),
            "peak_bytes": torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None,
            "repeats": num_steps,
        }

    def _step(self) -> tuple[Any, Any, Any, Tensor]:
        """The moments before a step, before its optimizer and after it; and its last loss."""
        start = self._mark()
        for tokens in self._batches:
            loss: Tensor = self._model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / MICRO_STEPS).backward()
        before_optimizer = self._mark()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        return start, before_optimizer, self._mark(), loss.detach()

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _seconds(start: Any, end: Any) -> float:
    return float(end - start) if isinstance(start, float) else float(start.elapsed_time(end)) / 1e3


def impose_routes(model: nn.Module, routes_TK: Tensor) -> None:
    """Have every router run, and every token go where `routes_TK` says, weighted as the router weighs these experts.

    Random weights are no trained router: deep in the model they send most tokens to the same few experts.
    """
    config: Any = model.config
    dtype = next(model.parameters()).dtype
    offset_TE = torch.full((len(routes_TK), config.num_experts), NOT_ROUTED, dtype=dtype, device=routes_TK.device)
    offset_TE.scatter_(1, routes_TK, 0.0)

    def impose(_: nn.Module, __: Any, found: Any) -> Any:
        if isinstance(found, Tensor):
            return found + offset_TE
        logits_TE, weights_TK, _ = found
        chosen_TK = logits_TE.softmax(-1, dtype=torch.float32).gather(1, routes_TK)
        if config.norm_topk_prob:
            chosen_TK = chosen_TK / chosen_TK.sum(-1, keepdim=True)
        return logits_TE, chosen_TK.to(weights_TK.dtype), routes_TK

    for router in _routers(model):
        router.register_forward_hook(impose)


@contextmanager
def expert_loads(model: nn.Module) -> Iterator[list[float]]:
    """The tokens of the busiest expert over the mean, one number for each router that runs."""
    loads: list[float] = []
    config: Any = model.config

    def note(_: nn.Module, __: Any, found: Any) -> None:
        chosen = found.topk(config.num_experts_per_tok, dim=-1).indices if isinstance(found, Tensor) else found[-1]
        counts = torch.bincount(chosen.flatten(), minlength=config.num_experts)
        loads.append(float(counts.max()) * config.num_experts / chosen.numel())

    hooks = [router.register_forward_hook(note) for router in _routers(model)]
    try:
        yield loads
    finally:
        for hook in hooks:
            hook.remove()


def _routers(model: nn.Module) -> list[nn.Module]:
    """The modules called `mlp.gate`.

    In 4.57 a linear layer, whose block takes the top-k of the logits that it returns; in 5 a module that returns
    logits (T, E), weights (T, K) and experts (T, K).
    """
    return [module for name, module in model.named_modules() if name.endswith("mlp.gate")]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
