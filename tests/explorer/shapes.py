"""Models by their shapes, as requests have them."""

from __future__ import annotations

from typing import Any


def shapes(
    layers: int, hidden: int, ffn: int | None = None, *, heads: int, vocab: int, length: int, **others: Any
) -> dict[str, Any]:
    """Return the fields of a model of so many layers, with others by their own names."""
    made = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads}
    made |= {"vocab_size": vocab, "seq_length": length, **others}
    return {name: value for name, value in made.items() if value is not None}


def experts(number: int, top_k: int, width: int, **others: Any) -> dict[str, Any]:
    """Return the fields of a mixture of experts, of which a token goes to `top_k`."""
    return {"num_experts": number, "top_k": top_k, "expert_ffn_hidden_size": width, **others}
