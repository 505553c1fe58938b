"""Which back end of torch's attention is chosen where nobody pins one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

_NAMES = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}


@contextmanager
def recorded_choices() -> Iterator[list[str]]:
    """Within the context, the back end of each call of scaled_dot_product_attention is appended to the list."""
    original, chosen = F.scaled_dot_product_attention, []

    def attend(*args: Any, **kwargs: Any) -> Any:
        scale, grouped = kwargs.pop("scale", None), kwargs.pop("enable_gqa", False)
        kwargs |= {"scale": scale, "enable_gqa": grouped}
        choice = torch._fused_sdp_choice(*args, **kwargs)
        chosen.append(_NAMES.get(int(choice), str(choice)))
        return original(*args, **kwargs)

    F.scaled_dot_product_attention = attend
    try:
        yield chosen
    finally:
        F.scaled_dot_product_attention = original
