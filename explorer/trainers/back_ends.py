"""The names of attention kernels, expert kernels and number formats in trainers and their libraries."""

from __future__ import annotations

from collections.abc import Mapping

from bexp.explorer.model.model import DType
from bexp.explorer.model.target import BEXP, TRANSFORMERS

TORCH_CHOICE = "sdpa"
"""torch's scaled_dot_product_attention, which chooses its kernel by itself."""
TORCH_KERNELS = frozenset({"flash", "cudnn", "efficient", "math"})
"""The kernels of torch's scaled_dot_product_attention that can be pinned."""
LIBRARY_ATTENTION = frozenset(
    {TORCH_CHOICE, "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"}
)
"""Attention implementations of the transformers library."""
LIBRARY_EXPERTS = frozenset({"eager", "batched_mm", "grouped_mm"})
"""Experts implementations of the transformers library that need no other package."""
OUR_EXPERTS = ("fused", "hopper_grouped")
"""Our own expert kernels; in the experts interface of the transformers library, each has the prefix `bexp_`."""
DEFAULT_EXPERTS = frozenset({"grouped_mm", "loop"})
"""Expert back ends, one of which is the default of a device."""
_LIBRARY_NAMES = {"loop": "eager", "bmm": "batched_mm"}
"""The transformers library's names of our reference layers' expert back ends, where they differ."""
ATTENTION_OF: Mapping[str, frozenset[str]] = {
    BEXP: TORCH_KERNELS,
    TRANSFORMERS: LIBRARY_ATTENTION | {f"{TORCH_CHOICE}:{kernel}" for kernel in TORCH_KERNELS},
}
EXPERTS_OF: Mapping[str, frozenset[str]] = {
    BEXP: DEFAULT_EXPERTS | _LIBRARY_NAMES.keys() | set(OUR_EXPERTS),
    TRANSFORMERS: LIBRARY_EXPERTS | {f"bexp_{name}" for name in OUR_EXPERTS},
}
"""The back ends of a target. A person's own target has no names for the kernels that it calls."""
RECORDED_EXPERTS = frozenset({"triton_grouped"})
"""Expert back ends of recorded tables that this version does not have; a worker without such a table refuses them."""
HALF_NAMES: dict[str, str] = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}
"""Trainers' names of the formats of half precision, such as the fields that switch autocast on."""


def library_experts(name: str) -> str:
    """Return the transformers library's name of an expert back end; ours keep their own."""
    return _LIBRARY_NAMES.get(name, name)
