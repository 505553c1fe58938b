"""The check whether a model keeps packed texts apart: each must train as it does alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bexp.explorer.cost.text_batches import TextBatch
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings
from bexp.workers.targets.transformers.batch import is_flattened, make_batch
from bexp.workers.targets.transformers.config import ResolvedConfig, one_line, quiet_library
from bexp.workers.targets.transformers.model import BuildSettings, build_model

MOST_LEAKED = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""The most that may be left of the difference between texts joined to one and texts alone, by the number format.

Texts that are packed without any marks have all of that difference. The rounding of bfloat16 makes a small part of it.
"""
LEAK = "attention reaches across packed texts"


class LeakError(Exception):
    """Packed texts do not train as they do one by one."""


def packed_texts(length: int, *, flattened: bool) -> TextBatch:
    """Return two packed rows of `length` tokens, the second with padding at its end."""
    first = max(2, length // 3)
    rows = ((first, length - first), (length - first - 1,))
    return TextBatch(rows, length, is_packed=True, is_flattened=flattened)


def require_apart(
    tiny: ResolvedConfig,
    settings: BuildSettings,
    device: torch.device,
    prepare: Callable[[Any], object],
    *,
    flattened: bool = False,
) -> None:
    """Compare packed texts with the same texts one by one: logits, loss, and gradients of a tiny model.

    `prepare` changes the model once it is built. Each difference is judged as a share of that of the same tokens as one
    text.

    Raises:
        LeakError: a text sees another one, or its positions do not begin anew.
    """
    settings = replace(settings, training=True)
    with quiet_library():
        model = build_model(tiny, settings, device).eval()  # no dropout, which would differ from run to run
        prepare(model)
        texts = packed_texts(tiny.seq_length, flattened=flattened)
        batch = make_batch(tiny.config, texts, device)
        mixed = {name: batch[name] for name in ("input_ids", "labels")}
        packed, alone, joined = (
            _results(model, batches, settings, device) for batches in ([batch], _alone(batch, texts), [mixed])
        )
    for name, expected in alone.items():
        leaked = _distance(packed[name], expected)
        if name != "loss" and leaked > MOST_LEAKED[settings.dtype] * _distance(joined[name], expected):
            share = leaked / max(_distance(joined[name], expected), 1e-30)
            raise LeakError(
                f"{LEAK}: {name} differ from those of the texts one by one, by "
                f"{share:.1%} of what they differ by if all is one text"
            )
    if abs(float(packed["loss"] - alone["loss"])) > MOST_LEAKED[settings.dtype] * 0.1 * abs(float(alone["loss"])):
        raise LeakError("the loss of packed texts is not that of the texts one by one")


def find_leak(
    tiny: ResolvedConfig, build: BuildSettings, device: torch.device, attention: str, *, flattened: bool
) -> str | None:
    """Return why packed texts of `tiny` do not train as they do alone with an attention on a device; None if they do.

    Kernels without float32 are compared in bfloat16. Quantised weights and their adapters are left out, because they
    compute in bfloat16 with any attention.
    """
    if build.quantization is not None:
        build = replace(build, quantization=None, prepare=None, mixed=False)
    has_float32 = not is_flattened(attention) and (":" not in attention or device.type == "cpu")
    dtype = torch.float32 if has_float32 else torch.bfloat16
    settings = replace(build, precision="pure", dtype=dtype, mixed=build.mixed and not has_float32)

    def set_attention(model: Any) -> None:
        if attention != model.config._attn_implementation:  # a class may have its own and take no other
            set_up(model, Settings(attention=attention))

    try:
        require_apart(tiny, settings, device, set_attention, flattened=flattened)
    except LeakError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises is the reason
        return one_line(error)
    return None


def _alone(batch: dict[str, Tensor], texts: TextBatch) -> list[dict[str, Tensor]]:
    """Each text of a packed batch, padding included, as a micro-batch of its own."""
    ids, labels = (batch[name].reshape(-1) for name in ("input_ids", "labels"))
    ends = [n for row in texts.rows for n in (*row, texts.width - sum(row)) if n]
    parts = zip(ids.split(ends), labels.split(ends), strict=True)
    return [{"input_ids": one[None], "labels": own[None]} for one, own in parts]


def _results(
    model: Any, batches: list[dict[str, Tensor]], settings: BuildSettings, device: torch.device
) -> dict[str, Tensor]:
    """Logits in the order of tokens, the mean loss over the labels of all batches, and the gradients, in float32."""
    logits, total = [], torch.zeros((), device=device)
    counts = [int((batch["labels"][:, 1:] >= 0).sum()) for batch in batches]
    for batch, count in zip(batches, counts, strict=True):
        with settings.autocast(device):
            found = model(**batch, use_cache=False)
        logits.append(found.logits.detach().float().reshape(-1, found.logits.shape[-1]))
        if count:
            (found.loss * count / sum(counts)).backward()
            total = total + found.loss.detach() * count / sum(counts)
    gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return {"logits": torch.cat(logits), "loss": total, "gradients": torch.cat(gradients)}


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm())
