"""FSDP's keys, in and out, which Axolotl, LLaMA-Factory, TRL, transformers' arguments and accelerate share.

They are the switch `fsdp` and the mapping `fsdp_config`, whose keys may begin with `fsdp_`. Names as of accelerate 1.15
and transformers 5.23. FSDP2 is measured. It shards one decoder layer at a time: `zero3` frees the parameters after
forward, and `zero2` keeps them (`reshard_after_forward`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.spelling import shortened
from bexp.explorer.model.training import Sharding
from bexp.explorer.model.translation import Location, Section, Translation, is_unset
from bexp.explorer.trainers.deepspeed import exchange_notes, uses_deepspeed
from bexp.explorer.trainers.document import TrainerSettings, gathering_notes, is_launched
from bexp.explorer.trainers.keys import IN_A_COMMAND, Key, Setting, Why, because, contents, words

PREFIX = "fsdp_"
RECOMPUTES = "activation_checkpointing"
KEPT = "fsdp"
"""The name by which a request keeps what an answer must know of these keys."""
WRAP = "TRANSFORMER_BASED_WRAP"
STRATEGIES = {"full_shard": Sharding.ZERO3, "shard_grad_op": Sharding.ZERO2, "no_shard": Sharding.NONE}
"""FSDP1's names of the levels; accelerate also takes their numbers, from 1 on."""
_HYBRID = ("hybrid_shard", "hybrid_shard_zero2")
_BY_NUMBER = dict(enumerate((*STRATEGIES, *_HYBRID), start=1))
_REFUSED = because(
    {
        f"{Why.OFFLOADING}: say false, or {IN_A_COMMAND}": (
            "offload_params cpu_offload activation_checkpointing_offload"
        ),
        "modules that are not sharded are not measured: remove it": "ignored_modules",
        "XLA is not measured: remove it": "xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt",
    }
)
_HARMLESS = words(
    """
    backward_prefetch backward_prefetch_policy forward_prefetch limit_all_gathers use_orig_params sync_module_states
    cpu_ram_efficient_loading state_dict_type final_state_dict_type cpu_offload_pin_memory
    transformer_layer_cls_to_wrap transformer_cls_names_to_wrap min_num_params
    """
)
"""Files, the order of exchanges in FSDP1, and the classes of the decoder layers."""
_READ = words(
    "version reshard_after_forward sharding_strategy activation_checkpointing auto_wrap_policy mixed_precision_policy"
)


@dataclass(frozen=True, slots=True)
class Fsdp:
    """The sharding that the keys of FSDP ask for."""

    level: Sharding
    version: int
    recomputes: bool
    """Whether FSDP recomputes every layer itself."""


def read_fsdp(switch: Any, config: Section, at: Location, version: int) -> Fsdp:
    """Read `fsdp`, which stands `at` a location, and `fsdp_config`; `version` is the trainer's own default.

    What is not measured is refused at its key.
    """
    translation = config.translation
    keys = {key.removeprefix(PREFIX): key for key in config.values}
    given = {name: value for name, key in keys.items() if (value := _plain(config.values[key])) is not None}
    for name, value in given.items():
        if name in _REFUSED and not is_unset(value):
            config.refuse(keys[name], _REFUSED[name])
    stated = str(given.get("version", version))
    if stated not in ("1", "2"):
        config.refuse(keys["version"], "must be 1 or 2")
    if str(given.get("auto_wrap_policy", WRAP)).upper() != WRAP:
        config.refuse(keys["auto_wrap_policy"], f"only one decoder layer at a time is measured: say {WRAP}")
    if str(given.get("mixed_precision_policy", "bf16")) not in ("bf16", "bfloat16"):
        config.refuse(keys["mixed_precision_policy"], "is measured with bf16 alone")
    unread = [keys[name] for name in given if name not in _READ | _HARMLESS | _REFUSED.keys()]
    translation.note_unknown([".".join(map(str, config.at(key))) for key in unread])
    found = [
        _level_of(given[name], translation, config.at(keys[name]))
        for name in ("reshard_after_forward", "sharding_strategy")
        if name in given
    ]
    words_found = [_level_of(word, translation, at) for word in _words_of(switch)]
    before = found[:1] if "reshard_after_forward" in given else []
    level = next((each for each in [*before, *words_found, *found] if each is not None), Sharding.ZERO3)
    return Fsdp(level, 1 if stated == "1" else 2, given.get(RECOMPUTES) is True)


def _plain(value: Any) -> Any:
    """Return a value without the quotes that people put around true, false and none."""
    return {"true": True, "false": False, "none": None}.get(value.lower(), value) if isinstance(value, str) else value


def _words_of(switch: Any) -> list[str]:
    """Return the words of `fsdp` that name something; it may also be a plain switch."""
    given = switch.split() if isinstance(switch, str) else switch if isinstance(switch, list | tuple) else ()
    return [str(word) for word in given if str(word).lower() not in ("auto_wrap", "true")]


def _level_of(value: Any, translation: Translation, where: Location) -> Sharding | None:
    """Return the level of a strategy, or of whether parameters are freed after forward."""
    if isinstance(value, bool):
        return Sharding.ZERO3 if value else Sharding.ZERO2
    name = str(_BY_NUMBER.get(int(value)) if str(value).isdecimal() else value).lower()
    if name == "offload":
        translation.refuse(where, f"{Why.OFFLOADING}: leave offload out")
    elif name in _HYBRID:
        translation.refuse(where, f"{name}: {Why.HYBRID}: say full_shard")
    elif name not in STRATEGIES:
        supported = ", ".join((*STRATEGIES, "auto_wrap"))
        translation.refuse(where, f"{shortened(name)} is not supported; supported: {supported}")
    return STRATEGIES.get(name)


def shards_by_fsdp(settings: TrainerSettings) -> bool:
    """Return whether an export shards, and by FSDP."""
    return settings.sharding is not Sharding.NONE and not uses_deepspeed(settings)


def refuse_second_sharding(translation: Translation, second: Location, first: Location) -> None:
    """Refuse what says how to shard after another file, or another key, has said it."""
    translation.refuse(second, f"shards as {'.'.join(map(str, first))} does: keep one of them")


def keep_recomputation(translation: Translation, found: Fsdp) -> None:
    """Keep with a request whether FSDP recomputes layers, and not the Trainer: an answer changes the same key."""
    translation.put(("kept", KEPT), {RECOMPUTES: found.recomputes})


def recomputes_by_fsdp(settings: TrainerSettings) -> bool:
    """Return whether FSDP recomputes every layer; if the Trainer does, parameters are gathered once more."""
    kept = settings.request.get("kept", {}).get(KEPT, {})
    return shards_by_fsdp(settings) and settings.recompute is Recompute.FULL and kept.get(RECOMPUTES, True)


def recomputes_itself(settings: TrainerSettings) -> bool:
    """Return whether the trainer recomputes; FSDP recomputes layers itself."""
    return settings.recompute is not Recompute.NONE and not recomputes_by_fsdp(settings)


def fsdp_config(settings: TrainerSettings) -> dict[str, Any] | None:
    """Return the fields of FSDP2, unless a configuration of `accelerate launch` has them."""
    return None if is_launched(settings) else launched_config(settings)


def launched_config(settings: TrainerSettings) -> dict[str, Any] | None:
    """Return the fields of FSDP2; `zero2` keeps the parameters whole after forward."""
    if not shards_by_fsdp(settings):
        return None
    config = {"version": 2, "reshard_after_forward": settings.sharding is Sharding.ZERO3}
    return {**config, RECOMPUTES: True} if recomputes_by_fsdp(settings) else config


def sharding_notes(settings: TrainerSettings) -> list[str]:
    """Return notes on exchanges at other times than was measured, and on files that the answer changes as well."""
    notes = exchange_notes(settings) if uses_deepspeed(settings) else gathering_notes(settings)
    return [*notes, *_launch_notes(settings)]


def _launch_notes(settings: TrainerSettings) -> list[str]:
    """Return what the configuration of `accelerate launch` must say: no other file has it, and options may differ."""
    if not is_launched(settings):
        return []
    notes = [f"measured with sharding {settings.sharding}: the configuration of accelerate launch must say that"]
    if settings.request["kept"].get(KEPT, {}).get(RECOMPUTES, False) and not recomputes_by_fsdp(settings):
        notes.append(f"in the configuration of accelerate launch: {PREFIX}{RECOMPUTES}: false")
    return notes


def _accelerator_config(settings: TrainerSettings) -> dict[str, Any] | None:
    """Return the setting by which accelerate reduces gradients in each accumulation step, if that was measured."""
    reduces = settings.reduces_each_batch and shards_by_fsdp(settings)
    return {"gradient_accumulation_kwargs": {"sync_each_batch": True}} if reduces else None


FSDP_CONFIG = Key(Setting.FSDP_CONFIG, contents("the mapping of FSDP's keys"), fsdp_config)
ACCELERATOR_CONFIG = Key(write=_accelerator_config)
FSDP: Mapping[str, Key] = {
    "fsdp": Key(Setting.FSDP, lambda value: value or None, lambda settings: fsdp_config(settings) and True),
    "fsdp_config": FSDP_CONFIG,
    "accelerator_config": ACCELERATOR_CONFIG,
}
"""The keys of TrainingArguments."""
