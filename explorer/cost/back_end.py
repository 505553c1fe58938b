"""The back end of a component: what computes its attention and its experts, and how."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic_core import CoreSchema, core_schema

from bexp.explorer.dimensions.kernels import Kernels

COMPILED = "compiled"
"""Ends the text of a component that is compiled where others are not."""


class BackEnd(NamedTuple):
    """What a component depends on beside its shapes; as text, `sdpa+grouped_mm+liger+compiled`.

    `attention` and `experts` name kernels. `setting` is the loss of a shell, or the choice that the target itself
    offers for a model that is measured whole.
    """

    attention: str | None = None
    experts: str | None = None
    liger: bool = False
    compiled: bool = False
    setting: str | None = None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        """Write it as text; the component that has it reads that text, whose meaning depends on its kind."""
        return core_schema.no_info_plain_validator_function(
            cls._check,
            serialization=core_schema.to_string_ser_schema(when_used="always"),
            json_schema_input_schema=core_schema.str_schema(),
        )

    @classmethod
    def _check(cls, given: Any) -> BackEnd:
        if not isinstance(given, cls):
            raise ValueError("must be text")  # noqa: TRY004 - a broken rule to pydantic
        return given

    @classmethod
    def of_layer(cls, text: str) -> BackEnd:
        """Return the back end of a layer, which names its attention first."""
        attention, *others = text.split("+")
        experts = [name for name in others if name not in (COMPILED, Kernels.LIGER)]
        return cls(attention, experts[0] if experts else None, Kernels.LIGER in others, COMPILED in others)

    @classmethod
    def of_block(cls, text: str, *, has_experts: bool) -> BackEnd:
        """Return the back end of a reference block. What it names beside the compiler are its experts or attention."""
        names = text.split("+")
        own = next((name for name in names if name != COMPILED), None)
        kernels = cls(experts=own) if has_experts else cls(attention=own)
        return kernels._replace(compiled=COMPILED in names)

    @property
    def plain(self) -> BackEnd:
        """The same kernels without the compiler."""
        return self._replace(compiled=False)

    @property
    def fusing(self) -> str | None:
        """What fuses small operations: the compiler or liger's kernels; None if they run one by one."""
        if self.compiled:
            return COMPILED
        return Kernels.LIGER.value if self.liger else None

    @property
    def unfused(self) -> BackEnd:
        """The same kernels of attention and experts, and nothing fused around them."""
        return self._replace(liger=False, compiled=False)

    def __str__(self) -> str:
        """Return the text that recordings contain."""
        how = (Kernels.LIGER.value if self.liger else None, COMPILED if self.compiled else None)
        return "+".join(filter(None, (self.attention, self.experts, *how, self.setting)))
