"""Random micro-batches: token ids and labels, with masks or positions that separate texts of unequal length."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bexp.explorer.cost.text_batches import TextBatch
from bexp.workers.targets.transformers.config import is_int

_SPECIAL = re.compile(r".*(token_id|token_index|_index)")
_IGNORED_LABEL = -100


def make_batch(config: Any, texts: TextBatch, device: torch.device, *, seed: int = 0) -> dict[str, Tensor]:
    """Return `input_ids` and `labels`, (rows, width), uniform over the ordinary tokens of the vocabulary.

    Padded rows have an `attention_mask`, and packed ones `position_ids` that begin anew with each text, as collators of
    the library make them. The loss ignores labels of padding, and of the first token of a packed text. Flattened rows
    are one row. Ids that the configuration gives a special meaning are never drawn.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + texts.size)
    ordinary = _ordinary_tokens(config)
    drawn = torch.randint(len(ordinary), (texts.size, texts.width), generator=generator)
    ids_BS = ordinary[drawn]
    labels_BS = ids_BS.clone()
    batch = {"input_ids": ids_BS, "labels": labels_BS}
    if not texts.is_whole:
        is_text_BS = torch.arange(texts.width) < torch.tensor([sum(row) for row in texts.rows])[:, None]
        ids_BS.masked_fill_(~is_text_BS, _padding_token(config))
        labels_BS.masked_fill_(~is_text_BS, _IGNORED_LABEL)
        if texts.is_packed:
            batch["position_ids"] = torch.stack([_positions(row, texts.width) for row in texts.rows])
            labels_BS.masked_fill_(batch["position_ids"] == 0, _IGNORED_LABEL)
        else:
            batch["attention_mask"] = is_text_BS.long()
    if texts.is_flattened:
        batch = {name: tensor.reshape(1, -1) for name, tensor in batch.items()}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def arranged(texts: TextBatch, attention: str | None, *, flattens: bool) -> TextBatch:
    """Return the texts as they reach a model with an attention of the library.

    Flash attention takes one packed row, and a trainer that `flattens` gives one to any attention.
    """
    packs = texts.is_packed and not texts.is_whole
    flat = packs and (flattens or is_flattened(attention))
    return replace(texts, is_flattened=True) if flat else texts


def is_flattened(attention: str | None) -> bool:
    """Return whether an attention of the library keeps packed texts apart only if all are in one row."""
    return (attention or "").startswith("flash_attention")


def _positions(row: tuple[int, ...], width: int) -> Tensor:
    """The position of each token in its text; the rest of the row counts as a text."""
    return torch.cat([torch.arange(n) for n in (*row, width - sum(row))])


def _ordinary_tokens(config: Any) -> Tensor:
    text_config = config.get_text_config(decoder=True)
    special: set[int] = set()
    for values in (config.to_dict(), text_config.to_dict()):
        for name, value in values.items():
            if _SPECIAL.fullmatch(name):
                special.update(one for one in (value if isinstance(value, (list, tuple)) else [value]) if is_int(one))
    allowed = torch.ones(int(text_config.vocab_size), dtype=torch.bool)
    allowed[[token for token in special if 0 <= token < len(allowed)]] = False
    return allowed.nonzero().flatten()


def _padding_token(config: Any) -> int:
    token = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    return token if is_int(token) and token >= 0 else 0
