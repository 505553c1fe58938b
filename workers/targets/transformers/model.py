"""A model of the library, built layer by layer on the meta device, on a real one, or in parts."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from bexp.explorer.model.quantization import Quantization
from bexp.explorer.model.training import Precision
from bexp.out_of_memory import is_out_of_memory
from bexp.workers.targets.transformers.config import ResolvedConfig, UnsupportedModelError, one_line, quiet_library
from bexp.workers.targets.transformers.kinds import find_layers
from bexp.workers.targets.transformers.quantized import Quantizer, quantize

META = torch.device("meta")

UPCAST_EMBEDDINGS = {
    "gpt_neox": "embed_in",
    "falcon": "word_embeddings",
    "nemotron_h": "embeddings",
    "bailing_hybrid": "word_embeddings",
}
"""Axolotl's names of embeddings, by the type of a model; `embed_tokens` for all others."""


@dataclass(frozen=True)
class BuildSettings:
    """Settings by which a model is built and run."""

    precision: Precision = "pure"
    """The number formats of parameters and products.

    - `pure` keeps parameters in `dtype`, except those that the class always keeps in float32.
    - `autocast` keeps them in float32 and runs under autocast of `dtype`.
    - `master` keeps all of them in `dtype`, and the optimizer has float32 master weights.
    - `upcast` casts norms, embeddings, output layer and routers to float32, as Axolotl does, and runs under autocast.
    - The recipes of float8 build as `pure` does.
    """
    dtype: torch.dtype = torch.bfloat16
    attention: str | None = None
    """The library's name of an attention implementation; None for its default."""
    experts: str | None = None
    """The library's name of an experts implementation; None for its default."""
    training: bool = True
    """In training mode, not eval mode."""
    seed: int = 0
    """Of random weights."""
    prepare: Callable[[Any], None] | None = None
    """Changes a model in place once it is built (patches, adapters, frozen weights), on any device.

    Its random numbers follow from `seed`.
    """
    mixed: bool = False
    """`pure` parameters run under autocast of `dtype` as well, because some are in float32."""
    quantization: Quantization | None = None
    """How linear layers that are on a device are quantised, before `prepare`; None: not at all."""

    @property
    def parameter_dtype(self) -> torch.dtype:
        """The dtype of parameters when they are created."""
        return torch.float32 if self.precision == "autocast" else self.dtype

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of the hidden states between layers, which begin as embeddings."""
        is_prepared = self.quantization is not None and self.training  # peft casts embeddings to float32
        return torch.float32 if self.precision in ("autocast", "upcast") or is_prepared else self.dtype

    @property
    def keeps_master_weights(self) -> bool:
        """Whether the optimizer has a float32 copy of the parameters."""
        return self.precision == "master"

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context in which a forward runs on `device`."""
        if self.precision not in ("autocast", "upcast") and not self.mixed:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)


@dataclass
class Construction:
    """Notes of the layers of the given classes, in the order in which a model constructs them.

    `device_of(number)` says where layer `number` is created; the rest of the model is created on the device that is
    current. Class constructors are wrapped while the context is open, so no two may be open at the same time.
    """

    classes: frozenset[type[nn.Module]]
    device_of: Callable[[int], torch.device]
    built: list[nn.Module] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note constructions inside the context in `built`."""
        own = {one: one.__dict__.get("__init__") for one in self.classes}
        wrapped = {one: self._wrapped(one.__init__) for one in self.classes}
        try:
            for one in self.classes:
                one.__init__ = wrapped[one]  # type: ignore[method-assign]  # for as long as a model is built
            yield
        finally:
            for one, original in own.items():
                if original is None:
                    del one.__init__
                else:
                    one.__init__ = original  # type: ignore[method-assign]  # as it was

    def _wrapped(self, original: Callable[..., None]) -> Callable[..., None]:
        state = self

        def construct(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if any(module is one for one in state.built[-1:]):  # a subclass calls its parent's constructor
                original(module, *args, **kwargs)
                return
            state.built.append(module)
            with state.device_of(len(state.built) - 1):
                original(module, *args, **kwargs)
            _skip_drawing(module)

        return construct


def build_model(
    resolved: ResolvedConfig,
    settings: BuildSettings,
    device: torch.device,
    construction: Construction | None = None,
) -> Any:
    """Return a causal language model with random weights on `device`, as `from_config` makes it.

    The weights are drawn by the class's own `_init_weights` and from `settings.seed`, so they resemble the start of a
    training run. A `construction` says where the layers lie. The caller's random state is kept.

    Raises:
        UnsupportedModelError: the class fails to build, or refuses an implementation.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - transformers is optional

    from_config: Callable[..., Any] = AutoModelForCausalLM.from_config

    chosen = {"attn_implementation": settings.attention, "experts_implementation": settings.experts}
    arguments = {name: value for name, value in chosen.items() if value is not None}
    recording = nullcontext() if construction is None else construction.recording()
    config = copy.deepcopy(resolved.config)
    devices = [device] if device.type == "cuda" else []
    with quiet_library(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(settings.seed)
        try:
            with device, recording:
                model = from_config(config, dtype=settings.parameter_dtype, trust_remote_code=False, **arguments)
        except Exception as error:  # the code of a model raises errors of its own
            if is_out_of_memory(error):
                raise
            name = resolved.model_class.__name__
            raise UnsupportedModelError(f"{name} does not build: {one_line(error)}") from error
        if settings.precision != "autocast":
            _keep_in_float32(model, settings.parameter_dtype)
        if settings.keeps_master_weights:
            for parameter in model.parameters():  # DeepSpeed keeps a class's float32 buffers, but no such parameters
                parameter.data = parameter.data.to(settings.dtype)
        if settings.precision == "upcast":
            _upcast(model)
        if settings.quantization is not None and device != META:
            quantize(model, settings.quantization, device)
        if settings.prepare is not None:
            settings.prepare(model)
    return model.train(settings.training)


def _skip_drawing(layer: nn.Module) -> None:
    """Have the library draw nothing for what lies on the meta device, which takes it milliseconds a tensor."""
    for module in layer.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and all(tensor.device == META for tensor in own):
            module._is_hf_initialized = True  # type: ignore[assignment]  # as the library marks what it has drawn


def _upcast(model: Any) -> None:
    """Cast the modules that Axolotl casts, by their names, before it trains all weights."""
    embeddings = UPCAST_EMBEDDINGS.get(model.config.model_type, "embed_tokens")
    for name, module in model.named_modules():
        is_embedding = (embeddings in name or "lm_head" in name) and hasattr(module, "weight")
        if "norm" in name or name.endswith(".gate") or is_embedding:
            module.to(torch.float32)


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Cast parameters that the class always keeps in float32, as loading a checkpoint in `dtype` does."""
    if dtype not in (torch.float16, torch.bfloat16):
        return
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name in names:
        pattern = re.compile(rf"(^|\.){name}($|\.)")
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if pattern.search(tensor_name) and tensor.is_floating_point():
                tensor.data = tensor.data.float()


_SPREAD = 0.02  # of weights that the class itself does not initialise


def build_by_layers(
    resolved: ResolvedConfig, settings: BuildSettings, device: torch.device, take: Callable[[nn.Module], None]
) -> Any:
    """Return the whole model on `device`. `take` gets each decoder layer as soon as the layer has its weights.

    A quantised model is prepared when all of its weights exist, as after loading a checkpoint. Weights are drawn by the
    class's own `_init_weights` from `settings.seed`, so every process draws the same. They differ from those that
    `build_model` draws from this seed.

    Raises:
        UnsupportedModelError: the class fails to build, or two layers share a weight.
    """
    is_quantized = settings.quantization is not None
    model = build_model(resolved, replace(settings, prepare=None) if is_quantized else settings, META)
    quantizer = None if settings.quantization is None else Quantizer(model, settings.quantization, device)
    layers = find_layers(model)
    inside = [id(module) for layer in layers for module in layer.modules()]
    weights = [id(weight) for layer in layers for weight in layer.parameters()]
    if len(set(inside)) < len(inside) or len(set(weights)) < len(weights):
        raise UnsupportedModelError(f"layers of {type(model).__name__} share weights, so they cannot be sharded")
    shell = [module for module in model.modules() if id(module) not in set(inside)]
    devices = [device] if device.type == "cuda" else []
    with quiet_library(), torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(settings.seed)
        for layer in layers:
            _fill(model, layer.modules(), device, quantizer)
            take(layer)
        _fill(model, shell, device, quantizer, before_drawing=model.tie_weights)
    if quantizer is not None:
        quantizer.finish()
        if settings.prepare is not None:
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(settings.seed)
                settings.prepare(model)
    return model.train(settings.training)


def _fill(
    model: Any,
    modules: Iterable[nn.Module],
    device: torch.device,
    quantizer: Quantizer | None = None,
    before_drawing: Callable[[], None] = lambda: None,
) -> None:
    """Put the modules' own tensors on `device`, initialise them, and quantise those that the quantizer has chosen."""
    chosen = list(modules)
    modules = chosen if quantizer is None else [quantizer.plain_of(module) for module in chosen]
    for module in modules:
        module.to_empty(device=device, recurse=False)
    before_drawing()
    for module in modules:
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if tensor.is_floating_point():
                tensor.normal_(0.0, _SPREAD)
            else:
                tensor.zero_()
    for module in modules:
        model._init_weights(module)
    if quantizer is not None:
        quantizer.convert(chosen)
