"""The experts implementation of a model: one of transformers' own, or our kernels under names of their own.

transformers calls `function(module, hidden_states, top_k_index, top_k_weights)`, with the weights `gate_up_proj`
(E, 2H, D) and `down_proj` (E, D, H), or transposed in some classes. Our kernels read both layouts in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bexp.explorer.dimensions.experts import OUR_EXPERTS
from bexp.kernels.activations import Activation
from bexp.transformers.layers import configurations
from bexp.transformers.settings import SettingsError
from bexp.transformers.undo import Changes

if TYPE_CHECKING:
    from bexp.kernels.shapes import ExpertsShape

ExpertFFN = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Activation], Tensor]

OURS = tuple(f"bexp_{name}" for name in OUR_EXPERTS)
_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "ReLU": "relu",
}
_HALF = (torch.bfloat16, torch.float16)
_LEFT_EAGER: dict[str, ExpertFFN] = {}
"""Our implementations that compiled layers call outside of their graphs, by name."""


def expert_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules that call the implementation that is set."""
    return [part for part in module.modules() if hasattr(part, "is_concatenated") and hasattr(part, "has_gate")]


def set_experts(module: nn.Module, experts: str | None, changes: Changes, *, as_operator: bool = False) -> None:
    """Set the experts implementation called `experts`.

    `as_operator` calls the fused kernels as an operator of torch, so that recomputation policies by operation can see
    it. Raises SettingsError, with the reason, if the model or the device does not support it.
    """
    if experts is None:
        return
    modules = expert_modules(module)
    if not modules:
        raise SettingsError(f"{type(module).__name__} has no experts whose implementation can be chosen")
    if experts in OURS:
        for part in modules:
            reason = unsupported_reason(part, experts)
            if reason is not None:
                raise SettingsError(f"experts '{experts}': {reason}")
        register()
        for part in modules:
            changes.set(part, "_bexp_as_operator", as_operator)
        if as_operator and _first_weight(modules[0]).is_cuda:
            import_module("bexp.kernels.experts.fused.operators")  # policies that keep results by operator must find it
    configs = _configs(modules)
    for config in configs:
        before = getattr(config, "_experts_implementation_internal", None)
        changes.on_undo(functools.partial(_set, config, before))
    setter = getattr(module, "set_experts_implementation", None)
    if setter is not None:
        try:
            setter(experts)
        except (ValueError, ImportError, KeyError) as error:
            raise SettingsError(f"experts '{experts}': {error}") from error
    for config in configs:
        _set(config, experts)
        if config._experts_implementation != experts:
            raise SettingsError(f"{type(module).__name__} took '{config._experts_implementation}' for '{experts}'")


def unsupported_reason(module: nn.Module, experts: str) -> str | None:
    """Return why our implementation `experts` cannot run this module; None if it can."""
    if not getattr(module, "is_concatenated", True):
        return "gate and up projections are interleaved; our kernels need them one after the other"
    if getattr(module, "has_bias", False):
        return "these experts have biases; our kernels have none"
    if getattr(module, "has_post_expert_norm", False):
        return "these experts end in a norm; our kernels have none"
    if getattr(module, "_is_expert_parallel", False):
        return "these experts are spread over devices"
    if not _default_gate(module):
        return f"{type(module).__name__} has its own way of gating experts"
    if _activation(module) is None:
        return f"our kernels do not support the activation {type(getattr(module, 'act_fn', None)).__name__}"
    weight = _first_weight(module)
    if not isinstance(weight, Tensor) or weight.ndim != 3:
        return "the experts' weights are not stored in one tensor"
    return _device_reason(experts, weight) or _kernel_reason(experts, module, weight)


def leave_eager(experts: str | None) -> None:
    """Keep our implementation `experts` out of the graphs of compiled layers if the compiler cannot trace it."""
    if experts not in OURS or experts in _LEFT_EAGER:
        return
    from bexp.kernels.experts.registry import expert_backend  # noqa: PLC0415 - kept light

    backend = expert_backend(experts.removeprefix("bexp_"))
    if not backend.traceable_dtypes:
        _LEFT_EAGER[experts] = torch.compiler.disable(backend.forward)


def register() -> None:
    """Make our implementations known to transformers. Each name is registered once."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415 - optional

    for name in OURS:
        if name not in ALL_EXPERTS_FUNCTIONS:
            ALL_EXPERTS_FUNCTIONS.register(name, functools.partial(_run, name))


def _run(name: str, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the expert FFN (T, D) of tokens (T, D), routes (T, K) and their weights."""
    first = _first_weight(module)
    second: Tensor = module.down_proj  # type: ignore[assignment]  # `nn.Module` types it as a tensor or a module
    if not module.is_transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    dtype = _compute_dtype(hidden_states, first)
    activation = _activation(module)
    assert activation is not None, "checked when the implementation was set"
    as_operator = getattr(module, "_bexp_as_operator", False)
    ffn = _implementation(name, hidden_states.device.type, first, as_operator=as_operator)
    if name != "bexp_fused":  # the fused kernels read routing weights of any format
        top_k_weights = top_k_weights.to(dtype)
    out = ffn(hidden_states.to(dtype), top_k_index, top_k_weights, first.to(dtype), second.to(dtype), activation)
    return out.to(hidden_states.dtype)


def _implementation(name: str, device_type: str, weight: Tensor, *, as_operator: bool) -> ExpertFFN:
    if device_type != "cuda":
        return _reference
    assert weight.is_cuda, "tokens and experts lie on one device"
    reason = _device_reason(name, weight)
    if reason is not None:  # the model was on the host when the implementation was set
        raise SettingsError(f"experts '{name}': {reason}")
    if name == "bexp_fused":
        return _fused_operator if as_operator or torch.compiler.is_compiling() else _fused
    from bexp.kernels.experts.registry import expert_backend  # noqa: PLC0415 - kept light

    if torch.compiler.is_compiling() and name in _LEFT_EAGER:
        return _LEFT_EAGER[name]
    return expert_backend(name.removeprefix("bexp_")).forward


def _fused(x: Tensor, routes: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation) -> Tensor:
    from bexp.kernels.experts.fused.function import fused_ffn  # noqa: PLC0415 - needs Triton

    return fused_ffn(x, routes, weights, w_in, w_out, activation)


def _fused_operator(
    x: Tensor, routes: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    from bexp.kernels.experts.fused.operators import fused_experts  # noqa: PLC0415 - needs Triton

    if routes.numel() == 0:
        return x * 0.0
    out: Tensor = fused_experts(x, routes, weights, w_in, w_out, activation, torch.is_grad_enabled())[0]
    return out


def _reference(
    x: Tensor, routes: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    """Compute the same with one product for each expert, for devices without our kernels."""
    from bexp.kernels.experts.grouped_ffn import grouped_ffn  # noqa: PLC0415 - kept light
    from bexp.kernels.experts.loop import grouped_gemm  # noqa: PLC0415 - likewise
    from bexp.kernels.experts.rows import sorted_rows  # noqa: PLC0415 - likewise

    rows = sorted_rows(routes, w_in.shape[0], count=True)
    return grouped_ffn(x, weights.to(x.dtype), w_in, w_out, activation, rows, grouped_gemm)


def _device_reason(experts: str, weight: Tensor) -> str | None:
    """Return why the kernels cannot run on the device of the weights. On the CPU a plain loop replaces them."""
    if weight.device.type != "cuda":
        return None
    return _cuda_reason(experts, str(weight.device), weight.shape[1], weight.shape[2])


def _cuda_reason(experts: str, device: str, first_size: int, second_size: int) -> str | None:
    """Return the same for a CUDA device and the sizes of a matrix."""
    from bexp.kernels.triton_support import triton_reason  # noqa: PLC0415 - kept light

    reason = triton_reason(torch.device(device))
    if reason is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if experts == "bexp_hopper_grouped" and capability != (9, 0):
        return f"it needs compute capability 9.0, not {capability[0]}.{capability[1]}"
    if experts == "bexp_fused" and capability < (9, 0):
        return f"it needs compute capability 9.0 or later, not {capability[0]}.{capability[1]}"
    if first_size % 8 or second_size % 8:
        return f"it needs sizes that are multiples of 8, not {(first_size, second_size)}"
    return None


# The compiler calls it while it traces, and takes the answer as a constant. `torch.compiler.assume_constant_result` is
# the same, and imports the compiler, which takes seconds.
_cuda_reason._dynamo_marked_constant = True  # type: ignore[attr-defined] # torch reads it


def _kernel_reason(experts: str, module: nn.Module, weight: Tensor) -> str | None:
    """Return why the back end refuses these experts; it is tried on a small example."""
    if weight.device.type != "cuda":
        return None
    from bexp.kernels.experts.registry import expert_backend  # noqa: PLC0415 - kept light

    shape = experts_shape(module, weight)
    return expert_backend(experts.removeprefix("bexp_")).unsupported_reason(shape, weight.device)


def kernel_shapes(module: nn.Module, top_k: int) -> set[tuple[ExpertsShape, bool]]:
    """Return the shapes of the experts in `module`, and whether our kernels read their matrices transposed."""
    found = set()
    for part in expert_modules(module):
        weight = _first_weight(part)
        if isinstance(weight, Tensor) and weight.ndim == 3:
            found.add((experts_shape(part, weight, top_k), not getattr(part, "is_transposed", False)))
    return found


def experts_shape(module: nn.Module, weight: Tensor, top_k: int = 1) -> ExpertsShape:
    """Return the shape of experts whose first matrices are `weight`."""
    from bexp.kernels.shapes import ExpertsShape  # noqa: PLC0415 - kept light

    gated = bool(getattr(module, "has_gate", True))
    first = weight if getattr(module, "is_transposed", False) else weight.transpose(1, 2)
    return ExpertsShape(
        hidden_size=first.shape[1],
        ffn_hidden_size=first.shape[2] // (2 if gated else 1),
        num_experts=first.shape[0],
        top_k=min(top_k, first.shape[0]),
        dtype=weight.dtype if weight.dtype in _HALF else torch.bfloat16,  # others are trained under autocast
        gated=gated,
        activation=_activation(module) or "silu",
    )


def _compute_dtype(hidden_states: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products: autocast's if it is on, as for any matrix product, else the weights'."""
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    if device_type == "cuda" and weight.dtype not in _HALF:
        raise SettingsError(f"our expert kernels multiply bfloat16 and float16, not {weight.dtype}: use autocast")
    return weight.dtype


def _activation(module: nn.Module) -> Activation | None:
    function = getattr(module, "act_fn", None)
    if isinstance(function, nn.GELU):
        return "gelu" if function.approximate == "none" else None
    return _ACTIVATIONS.get(type(function).__name__)


def _first_weight(module: nn.Module) -> Any:
    return getattr(module, "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", None)


def _default_gate(module: nn.Module) -> bool:
    from transformers.integrations import moe  # noqa: PLC0415 - optional

    if not getattr(module, "has_gate", True):
        return True
    return getattr(type(module), "_apply_gate", None) is getattr(moe, "_default_apply_gate", None)


def _configs(modules: list[nn.Module]) -> list[Any]:
    configs = {id(config): config for module in modules for config in configurations(module)}
    return list(configs.values())


def _set(config: Any, experts: str | None) -> None:
    config._experts_implementation_internal = experts
