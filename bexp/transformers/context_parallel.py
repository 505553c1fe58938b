"""Context parallelism in a model's own classes: each rank of a group computes its part of every sequence.

Everything but attention works on single tokens, so a model that gets a rank's tokens with their positions needs another
attention alone: that of `bexp.kernels.context_parallel`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.kernels.context_parallel.blocks import block_attention
from bexp.transformers.attention import set_attention
from bexp.transformers.layers import configurations, decoder_layers
from bexp.transformers.settings import SettingsError
from bexp.transformers.undo import Changes

BACKENDS = {None: None, "sdpa": None, "sdpa:flash": "flash", "sdpa:cudnn": "cudnn", "sdpa:math": "math"}
"""The kernel of a block by the name of a model's attention; None: flash where it takes the dtype, else math."""
IGNORED = -100
_SHARDED = ("input_ids", "inputs_embeds")
_CHANGING_BY_LENGTH = ("dynamic", "longrope")
"""Rotations whose frequencies depend on the longest position, which a rank does not hold."""
_numbers = itertools.count()


def set_context_parallel(
    model: Any, context: ContextParallel, attention: str | None, changes: Changes, *, recompute_core: bool = False
) -> None:
    """Let a causal language model compute this rank's part of each sequence that it is given whole.

    All ranks of the group call it with the same batch: `input_ids` or `inputs_embeds` (B, S, ...) and `labels` (B, S).
    The logits are those of the rank's tokens (B, S / N, V). The loss is that of all tokens. The mean of the ranks'
    gradients, which DDP and FSDP make, is the gradient of that loss. `attention` is the model's, as `Settings` have it.

    Raises SettingsError if its classes do not allow that. The model's forward raises it for padded batches, for
    arguments that are not known to be sharded, and for layers that mix tokens in another way.
    """
    _refuse_other_classes(model)
    if attention not in BACKENDS:
        names = ", ".join(filter(None, BACKENDS))
        raise SettingsError(f"attention '{attention}' cannot be spread over devices; these can: {names}")
    share = Share(context, BACKENDS[attention], len(decoder_layers(model)))
    set_attention(model, _register(share, changes), changes, recompute_core=recompute_core)
    loss = model.loss_function
    changes.set(model, "_loss_function", update_wrapper(partial(share.loss, loss), loss))
    signature = inspect.signature(model.forward)
    changes.set(model, "forward", update_wrapper(partial(share.forward, model.forward, signature), model.forward))


class Share:
    """A rank's share of a model's passes. Copies of a model have it in common."""

    def __init__(self, context: ContextParallel, backend: str | None, num_layers: int) -> None:
        self._context, self._backend, self._num_layers = context, backend, num_layers
        self._attended: set[int] = set()
        """The attention modules that have run in this pass."""
        self._num_targets: Tensor | int | None = None
        """Of all ranks; None after the loss has taken it."""
        self._has_same_batch = False

    def __deepcopy__(self, _: Any) -> Share:
        """Return the share itself: a process group cannot be copied."""
        return self

    def forward(self, forward: Callable[..., Any], signature: inspect.Signature, *args: Any, **kwargs: Any) -> Any:
        """Run a model's forward on this rank's tokens."""
        given = signature.bind(*args, **kwargs)
        named = dict(given.arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                named |= named.pop(name, {})
        labels, targets = named.pop("labels", None), named.pop("shift_labels", None)
        num_targets = named.pop("num_items_in_batch", None)
        if (mask := named.pop("attention_mask", None)) is not None and not bool(mask.all()):
            raise SettingsError("context parallelism takes no padding: give whole sequences of one length")
        whole = {name: named.pop(name) for name in _SHARDED if named.get(name) is not None}
        if others := [name for name, value in named.items() if not _is_plain(value)]:
            raise SettingsError(f"it is not known how ranks share {', '.join(others)}: leave it out")
        if not whole:
            raise SettingsError(f"context parallelism shards {' or '.join(_SHARDED)}, and there is none")
        tokens = next(iter(whole.values()))
        self._check_same_batch(tokens)
        if labels is not None or targets is not None:
            targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:] if targets is None else targets
            self._num_targets = (targets != IGNORED).sum() if num_targets is None else num_targets
            named["labels"] = self._context.shard(targets).contiguous()
        if "use_cache" in signature.parameters:
            named["use_cache"] = False
        self._attended.clear()
        parts = {name: self._context.shard(value) for name, value in whole.items()}
        positions = self._context.positions(tokens.shape[1], tokens.device)
        output = forward(**parts, position_ids=positions[None], **named)
        if len(self._attended) != self._num_layers:
            raise SettingsError(f"{self._num_layers - len(self._attended)} of the layers mix tokens in another way")
        if self._num_targets is not None:
            raise SettingsError("the model's loss is not transformers' causal language model loss")
        return output

    def loss(
        self, library: Callable[..., Tensor], logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any
    ) -> Tensor:
        """Return the loss of all ranks' tokens, with the gradient of this rank's share times the number of ranks."""
        num_targets, self._num_targets = self._num_targets, None
        assert num_targets is not None, "the forward that called this has counted the targets"
        kwargs |= {"num_items_in_batch": num_targets / self._context.size, "shift_labels": labels}
        return self._context.mean(library(logits, labels, vocab_size, **kwargs))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Return the attention (B, S / N, H, D) of this rank's queries to all keys, as transformers calls it."""
        length = query.shape[2] * self._context.size
        unknown = {
            "mask": attention_mask is not None,
            "dropout": dropout > 0,
            f"window of {sliding_window} tokens": sliding_window is not None and sliding_window < length,
            "capped scores": softcap is not None,
            "sinks": s_aux is not None,
        }
        if reasons := [name for name, is_asked in unknown.items() if is_asked]:
            raise SettingsError(f"attention over several devices takes no {' and no '.join(reasons)}")
        self._attended.add(id(module))
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        backend = self._backend or _usual_backend(query)
        out = self._context.attention(query, key, value, causal=causal, scale=scaling, backend=backend)
        return out.transpose(1, 2), None

    def _check_same_batch(self, tokens: Tensor) -> None:
        """Compare the first batch of the ranks: loaders give each process other samples unless they are told."""
        if self._has_same_batch:
            return
        ids = tokens.flatten() if tokens.dtype == torch.int64 else tokens.new_zeros(1, dtype=torch.int64)
        digest = (ids * torch.arange(1, len(ids) + 1, device=ids.device)).sum()
        mine = torch.stack([digest, *(digest.new_tensor(size) for size in tokens.shape[:2])])
        theirs = [torch.empty_like(mine) for _ in range(self._context.size)]
        dist.all_gather(theirs, mine, group=self._context.group)
        if not all(torch.equal(each, mine) for each in theirs):
            raise SettingsError("the ranks that share sequences have different batches: give all of them the same")
        self._has_same_batch = True


def _is_plain(value: Any) -> bool:
    """Return whether an argument is a switch, or asks for nothing."""
    return value is None or isinstance(value, bool) or (isinstance(value, int) and value == 0)


def _refuse_other_classes(model: Any) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: PLC0415 - optional

    name, loss = type(model).__name__, getattr(model, "loss_function", None)
    if loss is None or inspect.unwrap(loss) is not ForCausalLMLoss:
        raise SettingsError(f"{name} cannot share sequences: its loss is not transformers' causal language model loss")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise SettingsError(f"{name} cannot share sequences: it takes no position_ids")
    for config in configurations(model):
        others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
        rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
        if others:
            raise SettingsError(f"{name} cannot share sequences: it has layers of {', '.join(others)}")
        if rotation in _CHANGING_BY_LENGTH:
            raise SettingsError(f"{name} cannot share sequences: its rotation ('{rotation}') depends on their length")
        if getattr(config, "output_router_logits", False):
            raise SettingsError(f"{name} cannot share sequences with output_router_logits: that loss is of all tokens")


def _register(share: Share, changes: Changes) -> str:
    """Return the name under which transformers finds the attention of a share. It has no masks: none is made."""
    from transformers import AttentionInterface  # noqa: PLC0415 - optional

    name = f"bexp_context_parallel_{next(_numbers)}"
    AttentionInterface.register(name, share.attention)
    changes.on_undo(lambda: AttentionInterface._global_mapping.pop(name))
    return name


def _usual_backend(query: Tensor) -> str:
    reason = block_attention("flash").unsupported_reason(query.dtype, query.shape[-1], query.device)
    return "flash" if reason is None else "math"
