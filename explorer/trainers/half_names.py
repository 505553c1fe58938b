"""The names of number formats that trainers have."""

from __future__ import annotations

from bexp.explorer.model.model import DType

HALF_NAMES: dict[str, str] = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}
"""Trainers' names of the formats of half precision, such as the fields that switch autocast on."""
