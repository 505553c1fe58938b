"""A raw configuration, resolved and described for the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from bexp.explorer.cost.text_batches import TextBatch
from bexp.explorer.dimensions.attention import LIBRARY_ATTENTION
from bexp.explorer.dimensions.experts import LIBRARY_EXPERTS
from bexp.explorer.formats.model_types import reserved_positions
from bexp.explorer.model.parts import LayerPart, Part
from bexp.transformers.experts import expert_modules
from bexp.workers.targets.transformers.batch import make_batch
from bexp.workers.targets.transformers.builder import PartsBuilder
from bexp.workers.targets.transformers.config import (
    ResolvedConfig,
    UnsupportedModelError,
    one_line,
    quiet_library,
    resolve_config,
    with_values,
)
from bexp.workers.targets.transformers.kinds import find_layers, kind_names
from bexp.workers.targets.transformers.model import META, BuildSettings, build_model
from bexp.workers.targets.transformers.packing import find_leak
from bexp.workers.targets.transformers.parts import (
    dtype_bytes,
    layer_part,
    matrix_width,
    shell_part,
)
from bexp.workers.targets.transformers.self_check import FEATURES, SelfCheck, find_group_problem, self_check
from bexp.workers.targets.transformers.shrink import shrink, tiny_config

GENEROUS_SAVED_WIDTHS = 34
"""Hidden widths that a layer keeps for each token, where nothing better is known (Korthikanti et al., 2022)."""
TINY_POSITIONS = 16
MORE_TOKENS = 24
"""A number of tokens for which a model with TINY_POSITIONS may have no positions."""


def require_positions(resolved: ResolvedConfig) -> None:
    """Raise UnsupportedModelError if the sequence exceeds `max_position_embeddings` and the class cannot run it.

    Types like RoBERTa reserve some of the positions. A class with a table of positions fails beyond its end; one with
    rotary positions or none runs on. A tiny model of the type shows which it is.
    """
    stated = getattr(resolved.text_config, "max_position_embeddings", None)
    reserved = reserved_positions(resolved.text_config.to_dict())
    if not isinstance(stated, int) or resolved.seq_length <= stated - reserved:
        return
    reason = failure_with(resolved, MORE_TOKENS)
    if reason is not None:
        less = f" less {reserved} that no token has" if reserved else ""
        raise UnsupportedModelError(
            f"seq_length {resolved.seq_length} is longer than max_position_embeddings {stated}{less}, and "
            f"{resolved.model_class.__name__} has no further positions: {reason}"
        )


def failure_with(resolved: ResolvedConfig, num_tokens: int) -> str | None:
    """Return why a tiny model of the type, with TINY_POSITIONS, does not run so many tokens; None if it does."""
    config = with_values(resolved.config, _with_limit(shrink(resolved.config.to_dict(), 2), resolved.config))
    tiny = replace(resolved, config=config, seq_length=num_tokens)
    cpu = torch.device("cpu")
    model = build_model(tiny, BuildSettings(dtype=torch.float32), cpu)
    try:
        with quiet_library(), torch.no_grad():
            model(**make_batch(config, TextBatch.whole(1, num_tokens), cpu), use_cache=False)
    except Exception as error:  # noqa: BLE001 - whatever the model's code raises is the reason
        return one_line(error)
    return None


def _with_limit(values: dict[str, Any], config: Any) -> dict[str, Any]:
    """`values` with TINY_POSITIONS, by the class's own name for them, also in a nested text configuration."""
    text_config = config.get_text_config(decoder=True)
    name = getattr(text_config, "attribute_map", {}).get("max_position_embeddings", "max_position_embeddings")
    limited = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    for part in [limited, *(value for value in limited.values() if isinstance(value, dict))]:
        if isinstance(part.get(name), int):
            part[name] = TINY_POSITIONS
    return limited


def resolve(raw: Mapping[str, Any], seq_length: int, *, settings: BuildSettings | None = None) -> ResolvedModel:
    """Return the model that `raw` (a config.json's content) describes, built on the meta device.

    Raises:
        UnsupportedModelError: it cannot be built, or has no positions for `seq_length` tokens.
    """
    config = resolve_config(raw, seq_length)
    require_positions(config)
    settings = settings or BuildSettings()
    return ResolvedModel(config, settings, build_model(config, settings, META))


@dataclass(frozen=True)
class ResolvedModel:
    """A model of the installed library, described by its parts."""

    config: ResolvedConfig
    settings: BuildSettings
    model: Any
    """On the meta device."""

    @cached_property
    def layers(self) -> list[nn.Module]:
        """The layers on the meta device; empty if the model has no list of layers."""
        try:
            return find_layers(self.model)
        except UnsupportedModelError:
            return []

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer, in the model's order."""
        return tuple(kind_names(self.layers, self.model.config)) if self.layers else ()

    @cached_property
    def check(self) -> SelfCheck:
        """The abilities of a tiny model of this type; the check runs on the CPU for some seconds, at first use."""
        try:
            return self_check(self.tiny, self.settings.prepare)
        except UnsupportedModelError as error:
            return SelfCheck(failures=dict.fromkeys(FEATURES, f"the tiny model does not build: {error.reason}"))

    @cached_property
    def group_problem(self) -> str | None:
        """The reason why groups of the tiny model's layers cannot be recomputed as one; None if they can."""
        return find_group_problem(self.tiny, self.settings.prepare)

    def find_leak(self, device: torch.device, attention: str, *, flattened: bool) -> str | None:
        """Return why packed texts of the tiny model do not train as they do alone; None if they do."""
        return find_leak(self.tiny, self.settings, device, attention, flattened=flattened)

    @cached_property
    def layer_parts(self) -> tuple[LayerPart, ...]:
        """One layer of each kind, in order of first occurrence."""
        return tuple(self._layer_part(name) for name in dict.fromkeys(self.kinds))

    @property
    def shell_part(self) -> Part:
        """The part outside the layers."""
        config = self.model.config.get_text_config(decoder=True)
        return shell_part(self.model, self.layers, config, self.hidden_bytes_per_token)

    @cached_property
    def hidden_bytes_per_token(self) -> int:
        """Bytes of the hidden states at a layer's border: the tiny model's streams, with the full model's width."""
        tiny_width = self.tiny.text_config.hidden_size if self.check.hidden_per_token else 0
        streams = self.check.hidden_per_token // tiny_width if tiny_width else 1
        width = int(self.model.config.get_text_config(decoder=True).hidden_size)
        return max(streams, 1) * width * dtype_bytes(self.settings.hidden_dtype)

    @property
    def attention_implementations(self) -> dict[str, str | None]:
        """The library's attention implementations: None for one that can be set, else why it cannot."""
        return {name: self._refusal("get_correct_attn_implementation", name) for name in sorted(LIBRARY_ATTENTION)}

    @property
    def experts_implementations(self) -> dict[str, str | None]:
        """The library's experts implementations: None for one that can be set; empty for a model without experts."""
        if not expert_modules(self.model):
            return {}
        return {name: self._refusal("get_correct_experts_implementation", name) for name in sorted(LIBRARY_EXPERTS)}

    def builder(self, device: torch.device, settings: BuildSettings | None = None) -> PartsBuilder:
        """Return a builder of this model's parts on `device`, with `settings` in place of the resolved ones."""
        return PartsBuilder(
            self.config.without_balancing_loss(),
            self.kinds,
            device,
            settings or self.settings,
            classes=frozenset(type(layer) for layer in self.layers),
            followed_outputs=self._followed_outputs(),
        )

    @cached_property
    def tiny(self) -> ResolvedConfig:
        """The configuration of the self-check."""
        return tiny_config(self.config.without_balancing_loss(), self.kinds)

    @cached_property
    def _tiny_layers(self) -> list[nn.Module]:
        return find_layers(
            build_model(self.tiny, BuildSettings(dtype=torch.float32, prepare=self.settings.prepare), META)
        )

    def _layer_part(self, name: str) -> LayerPart:
        index, config = self.kinds.index(name), self.model.config.get_text_config(decoder=True)
        saved = self._saved_bytes(index, config) or GENEROUS_SAVED_WIDTHS * self.hidden_bytes_per_token
        return layer_part(
            name,
            self.kinds.count(name),
            self.layers[index],
            config,
            seq_length=self.config.seq_length,
            saved_bytes_per_token=saved,
        )

    def _saved_bytes(self, index: int, config: Any) -> float | None:
        """The bytes that the tiny layer of the same place keeps, scaled to the full layer's widths and number format.

        The estimate serves to leave out candidates that cannot fit, and errs to neither side.
        """
        if index >= len(self.check.kinds):
            return None
        kept = self.check.saved_bytes_per_token.get(self.check.kinds[index])
        tiny_width = matrix_width(self._tiny_layers[index], self.tiny.text_config)
        if kept is None or not tiny_width:
            return None
        return kept / 4 * dtype_bytes(self.settings.dtype) * matrix_width(self.layers[index], config) / tiny_width

    def _followed_outputs(self) -> dict[str, tuple[int, ...]]:
        by_kind = {}
        for index, kind in enumerate(self.kinds):
            if index < len(self.check.kinds) and kind not in by_kind:
                places = self.check.followed_outputs.get(self.check.kinds[index])
                if places:
                    by_kind[kind] = places
        return by_kind

    def _refusal(self, method: str, name: str) -> str | None:
        if method.endswith("experts_implementation") and not self.model._can_set_experts_implementation():
            return f"{type(self.model).__name__} does not take the experts interface"
        try:
            with quiet_library():
                getattr(self.model, method)(name)
        except (ValueError, ImportError, RuntimeError) as error:
            return one_line(error)
        return None
