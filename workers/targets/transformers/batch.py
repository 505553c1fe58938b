"""Random micro-batches: token ids, labels, and padding where it is asked for."""

from __future__ import annotations

import re
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor

Padding = Literal["none", "left", "right"]

_SPECIAL = re.compile(r".*(token_id|token_index|_index)")
_IGNORED_LABEL = -100
_SHORTEST = 0.5  # of the sequence length; padded lengths are uniform from here to the whole


def make_batch(
    config: Any,
    micro_batch_size: int,
    seq_length: int,
    device: torch.device,
    *,
    padding: Padding = "none",
    seed: int = 0,
) -> dict[str, Tensor]:
    """`input_ids` and `labels`, (micro_batch_size, seq_length), uniform over the ordinary tokens of the vocabulary.

    With padding there is an `attention_mask`, at least one sequence is of full length, and labels of padding are
    ignored by the loss. Ids that the configuration gives a special meaning are never drawn.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + micro_batch_size)
    ordinary = _ordinary_tokens(config)
    drawn = torch.randint(len(ordinary), (micro_batch_size, seq_length), generator=generator)
    ids_BS = ordinary[drawn]
    labels_BS = ids_BS.clone()
    batch = {"input_ids": ids_BS, "labels": labels_BS}
    if padding != "none":
        mask_BS = _mask(micro_batch_size, seq_length, padding, generator)
        ids_BS.masked_fill_(mask_BS == 0, _padding_token(config))
        labels_BS.masked_fill_(mask_BS == 0, _IGNORED_LABEL)
        batch["attention_mask"] = mask_BS
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _ordinary_tokens(config: Any) -> Tensor:
    text_config = config.get_text_config(decoder=True)
    special: set[int] = set()
    for values in (config.to_dict(), text_config.to_dict()):
        for name, value in values.items():
            if _SPECIAL.fullmatch(name):
                special.update(one for one in (value if isinstance(value, (list, tuple)) else [value]) if _is_int(one))
    allowed = torch.ones(int(text_config.vocab_size), dtype=torch.bool)
    allowed[[token for token in special if 0 <= token < len(allowed)]] = False
    return allowed.nonzero().flatten()


def _mask(micro_batch_size: int, seq_length: int, padding: Padding, generator: torch.Generator) -> Tensor:
    shortest = max(int(seq_length * _SHORTEST), 1)
    lengths_B = torch.randint(shortest, seq_length + 1, (micro_batch_size,), generator=generator)
    lengths_B[0] = seq_length
    position_S = torch.arange(seq_length)
    if padding == "left":
        position_S = position_S.flip(0)
    return (position_S[None, :] < lengths_B[:, None]).long()


def _padding_token(config: Any) -> int:
    token = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    return token if _is_int(token) and token >= 0 else 0


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
