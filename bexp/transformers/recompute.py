"""The activations of a model that are recomputed in backward (Chen et al., 2016, arXiv:1604.06174).

transformers' own mechanism recomputes layers: every decoder layer has a flag and a function that runs it. Policies by
operation use the same function with a rule for the result of each operator (torch's selective checkpointing).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bexp.explorer.dimensions.recompute import Recompute
from bexp.transformers.experts import expert_modules
from bexp.transformers.layers import decoder_layers
from bexp.transformers.settings import Settings, SettingsError
from bexp.transformers.undo import Changes


def pinned_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in pinned memory, whose allocator rounds up to a power of two."""
    return 1 << max(0, tensor.numel() * tensor.element_size() - 1).bit_length()


class OnHost:
    """The forward of a layer whose saved tensors lie in pinned memory of the host until backward needs them.

    torch's `save_on_cpu` copies them, except weights, which stay on the device in any case. `host_bytes` is the memory
    that the last forward took on the host.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._forward = layer.forward
        self._host = save_on_cpu(pin_memory=True)
        self._weights: frozenset[int] = frozenset()
        self.host_bytes = 0
        functools.update_wrapper(self, self._forward, updated=())  # the library reads the names of the arguments

    def __getstate__(self) -> dict[str, Any]:
        """Return all but torch's functions, which a copy or a stored model makes anew."""
        return {name: value for name, value in vars(self).items() if name != "_host"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` has returned."""
        vars(self).update(state, _host=save_on_cpu(pin_memory=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; without gradients this is a plain call."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        self.host_bytes = 0
        self._weights = frozenset(p.untyped_storage().data_ptr() for p in self._layer.parameters())
        with saved_tensors_hooks(self._pack, self._host.unpack_hook):
            return self._forward(*args, **kwargs)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in self._weights:
            return tensor.device, tensor.detach()
        self.host_bytes += pinned_bytes(tensor)
        return self._host.pack_hook(tensor)


Call = tuple[Callable[..., Any], tuple[Any, ...]]


class CheckpointedGroup:
    """A group of `size` layers, which the model calls one after another, each with arguments of its own.

    Each layer but the last only notes its call, and returns the hidden states that it got. The last one runs all noted
    calls under one checkpoint. A model that changes hidden states between its layers would compute something else. So a
    layer that does not get the group's own input raises SettingsError. A hook on a layer but the last sees the group's
    input as its output.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._hidden: Tensor | None = None
        self._calls: list[Call] = []

    def function(self, place: int) -> Callable[..., Any]:
        """Return the function that runs layer `place`, from 0, instead of `torch.utils.checkpoint.checkpoint`."""
        return functools.partial(self._take, place)

    def _take(self, place: int, function: Callable[..., Any], *args: Any) -> Any:
        if place == 0:  # calls may be left of a step that failed
            self._hidden, self._calls = args[0] if args and isinstance(args[0], Tensor) else None, []
        hidden = self._hidden
        if hidden is None or not args or args[0] is not hidden or len(self._calls) != place:
            raise SettingsError(
                "this model does something with hidden states between its layers, so that groups of layers cannot be "
                "recomputed as one"
            )
        self._calls.append((function, args[1:]))
        if place + 1 < self._size:
            return hidden
        calls, self._hidden, self._calls = tuple(self._calls), None, []
        return checkpoint(functools.partial(_run, calls), hidden, use_reentrant=False, early_stop=False)


def _run(calls: tuple[Call, ...], hidden: Tensor) -> Any:
    """Run the calls one after another, each on the result of the one before."""
    out: Any = hidden
    for function, args in calls:
        if not isinstance(out, Tensor):
            raise SettingsError("a layer of this model returns more than hidden states, so that no group can run on it")
        out = function(out, *args)
    return out


_ATTENTION_OPERATORS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable",
)
LAYERS_KEPT = (Recompute.NONE, Recompute.SELECTIVE, Recompute.EXPERTS, Recompute.OFFLOAD)
"""Policies that recompute no layer as a whole. Checkpointing of layers would change what they mean."""
BY_OPERATION = (Recompute.ACTIVATIONS, Recompute.PROJECTIONS)
"""Policies that keep the results of some operators in every layer and recompute the others."""
_PRODUCT_OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm", "_scaled_grouped_mm", "_scaled_mm")


def set_recompute(module: nn.Module, settings: Settings, changes: Changes) -> None:
    """Set the policy on a model, or on one decoder layer alone.

    Any policy by layer recomputes a layer that is given alone. Raises SettingsError if the class cannot be
    checkpointed.
    """
    policy = settings.policy
    if policy in {
        Recompute.NONE,
        Recompute.SELECTIVE,
    }:  # the attention core is recomputed by the attention function itself
        return
    layers = decoder_layers(module)
    if not layers:
        raise SettingsError(f"{type(module).__name__} has no decoder layers that can be recomputed")
    if policy is Recompute.EXPERTS:
        _recompute_experts(module, changes)
        return
    if policy is Recompute.OFFLOAD:
        for layer in layers:
            changes.set(layer, "forward", OnHost(layer))
        return
    run = functools.partial(checkpoint, use_reentrant=False)
    if policy in BY_OPERATION:
        rule = functools.partial(_keep, products=policy is Recompute.ACTIVATIONS)
        run = functools.partial(run, context_fn=functools.partial(create_selective_checkpoint_contexts, rule))
        chosen = set(range(len(layers)))
    else:
        chosen = chosen_layers(settings, len(layers)) if len(layers) > 1 or layers[0] is not module else {0}
    groups = None if policy.group_size is None else _group_functions(policy.group_size, len(layers))
    flags = [part for part in module.modules() if hasattr(part, "gradient_checkpointing")]
    if not any(hasattr(layer, "gradient_checkpointing") for layer in layers):
        if policy is not Recompute.FULL or not flags:
            can = "can recompute only all of its layers" if flags else "cannot recompute its layers"
            raise SettingsError(f"{type(module).__name__} {can}")
        chosen_parts = flags
    else:
        chosen_parts = [layer for i, layer in enumerate(layers) if i in chosen]
    wanted = {id(part) for part in chosen_parts}
    for part in flags:
        changes.set(part, "gradient_checkpointing", id(part) in wanted)
    for index, part in enumerate(chosen_parts):
        function = run if groups is None else groups[index]
        changes.set(part, "_gradient_checkpointing_func", function)


def is_checkpointing(module: nn.Module) -> bool:
    """Return whether transformers recomputes layers of `module`."""
    return any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


def stop_checkpointing(module: nn.Module, changes: Changes) -> None:
    """Keep what the layers compute, whatever was enabled before."""
    for part in module.modules():
        if getattr(part, "gradient_checkpointing", False):
            changes.set(part, "gradient_checkpointing", False)


def chosen_layers(settings: Settings, num_layers: int) -> set[int]:
    """The indices of the layers that a policy by layer recomputes; a share takes the first layers, groups take all.

    Raises SettingsError if the policy names more layers than there are.
    """
    policy = settings.policy
    named = policy.first_layers or policy.group_size
    if named is not None:
        if named > num_layers:
            raise SettingsError(f"'{policy}' names more layers than the {num_layers} of the model")
        return set(range(policy.first_layers or num_layers))
    count = max(1, round(policy.layer_share * num_layers))
    return set(range(count))


def _group_functions(size: int, num_layers: int) -> list[Callable[..., Any]]:
    """Return the function that runs each layer; the last group may be smaller."""
    functions = []
    for start in range(0, num_layers, size):
        group = CheckpointedGroup(min(size, num_layers - start))
        functions += [group.function(place) for place in range(min(size, num_layers - start))]
    return functions


@functools.cache
def _kept_operators(*, products: bool) -> frozenset[Any]:
    names = _ATTENTION_OPERATORS + (_PRODUCT_OPERATORS if products else ())
    operators = {getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)}
    if products and hasattr(torch.ops.bexp, "fused_experts"):
        operators.add(torch.ops.bexp.fused_experts.default)
    return frozenset(operators)


def _keep(_context: Any, operator: Any, *_args: Any, products: bool, **_kwargs: Any) -> CheckpointPolicy:
    is_kept = operator in _kept_operators(products=products)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute_experts(module: nn.Module, changes: Changes) -> None:
    parts = expert_modules(module)
    if not parts:
        raise SettingsError(f"{type(module).__name__} has no experts to recompute")
    for part in parts:
        changes.set(part, "forward", functools.partial(_run_recomputed, part.forward))


def _run_recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
