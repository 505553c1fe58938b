"""FSDP's keys, in and out, which Axolotl, LLaMA-Factory, TRL, transformers' arguments and accelerate share.

They are the switch `fsdp` and the mapping `fsdp_config`, whose keys may begin with `fsdp_`. Names as of accelerate 1.15
and transformers 5.23. FSDP2 is measured. It shards one decoder layer at a time: `zero3` frees the parameters after
forward, and `zero2` keeps them (`reshard_after_forward`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
RESHARDS = "reshard_after_forward"
STRATEGY = "sharding_strategy"
KEPT = "fsdp"
"""The name by which a request keeps what an answer must know of these keys."""
WRAP = "TRANSFORMER_BASED_WRAP"
STRATEGIES = {"full_shard": Sharding.ZERO3, "shard_grad_op": Sharding.ZERO2, "no_shard": Sharding.NONE}
"""FSDP1's names of the levels; accelerate also takes their numbers, from 1 on."""
_OF_FSDP2 = ("full_shard", "shard_grad_op")
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
_READ = words(f"version {RESHARDS} {STRATEGY} {RECOMPUTES} auto_wrap_policy mixed_precision_policy")


_SWITCHES = words(
    f"{RECOMPUTES} forward_prefetch limit_all_gathers use_orig_params sync_module_states cpu_ram_efficient_loading"
)
_SAVED = {
    1: ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", "1", "2", "3"),
    2: ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "1", "3"),
}
_PREFETCHED = ("NO_PREFETCH", "BACKWARD_PRE", "BACKWARD_POST", "1", "2")
"""Names, and accelerate's numbers of some of them."""


@dataclass(frozen=True, slots=True)
class Fsdp:
    """The sharding that the keys of FSDP ask for."""

    level: Sharding
    version: int
    recomputes: bool
    """Whether FSDP recomputes every layer itself."""


def read_fsdp(
    switch: Any,
    config: Section,
    at: Location,
    versions: Sequence[int] = (2, 1),
    *,
    outer: int | None = None,
    launched: bool = False,
) -> Fsdp:
    """Read `fsdp`, which stands `at` a location, and `fsdp_config`; `versions` are the trainer's, its default first.

    `outer` is the version that stands next to them. `launched` says that `accelerate launch` reads them, and no
    TrainingArguments. What is not measured, or what these refuse, is refused at its key.
    """
    translation = config.translation
    keys = by_short_names(config, PREFIX)
    given = {name: value for name, key in keys.items() if (value := _plain(config.values[key])) is not None}
    for name, value in given.items():
        if name in _REFUSED and not is_unset(value):
            config.refuse(keys[name], _REFUSED[name])
    stated = str(given.get("version", versions[0] if outer is None else outer))
    if outer is not None and stated != str(outer):
        config.refuse(keys["version"], "is another value of fsdp_version: keep one of them")
    elif stated not in map(str, versions):
        config.refuse(keys["version"], f"must be {' or '.join(map(str, sorted(versions)))}")
    found = 1 if stated == "1" else 2
    for name in ("sharding_strategy", "forward_prefetch") if 1 not in versions else ():
        if name in keys:  # whatever its value
            config.refuse(keys[name], f"is of FSDP1 alone: remove it; {RESHARDS} says what is freed after forward")
    policy = str(given.get("auto_wrap_policy", "NO_WRAP" if launched else WRAP))
    if (policy.upper() if launched else policy) != WRAP:
        key = keys.get("auto_wrap_policy", f"{PREFIX}auto_wrap_policy")
        config.refuse(key, f"only one decoder layer at a time is measured: say {WRAP}")
    if str(given.get("mixed_precision_policy", "bf16")) not in ("bf16", "bfloat16"):
        config.refuse(keys["mixed_precision_policy"], "is measured with bf16 alone")
    if str(given.get("state_dict_type", _SAVED[found][0])).upper() not in _SAVED[found]:
        config.refuse(keys["state_dict_type"], f"FSDP{found} does not save it: say SHARDED_STATE_DICT")
    if str(given.get("backward_prefetch", _PREFETCHED[0])).upper() not in _PREFETCHED:
        config.refuse(keys["backward_prefetch"], f"must be one of {', '.join(_PREFETCHED[:3])}")
    for name in sorted(_SWITCHES & given.keys()):
        if not isinstance(given[name], bool):
            config.refuse(keys[name], "must be true or false")
    if launched and given.get("sync_module_states") is False and given.get("cpu_ram_efficient_loading", True):
        config.refuse(keys["sync_module_states"], f"say true, or {PREFIX}cpu_ram_efficient_loading: false")
    unread = [keys[name] for name in given if name not in _READ | _HARMLESS | _REFUSED.keys()]
    translation.note_unknown([".".join(map(str, config.at(key))) for key in unread])
    said = [("fsdp", at, word) for word in _words_of(switch)]
    said += [(name, config.at(keys[name]), given[name]) for name in (RESHARDS, STRATEGY) if name in given]
    return Fsdp(_level_of(said, found, translation, launched=launched), found, given.get(RECOMPUTES) is True)


def by_short_names(config: Section, prefix: str) -> dict[str, str]:
    """Return the keys of a mapping by their names without `prefix`. Two values of one name are refused.

    accelerate takes the later one, and TrainingArguments the one with the prefix.
    """
    keys: dict[str, str] = {}
    for key, value in config.values.items():
        name = key.removeprefix(prefix)
        if str(config.values[keys.setdefault(name, key)]).lower() != str(value).lower():
            config.refuse(key, f"is another value of {keys[name]}: keep one of them")
    return keys


def _plain(value: Any) -> Any:
    """Return a value without the quotes that people put around true, false and none."""
    return {"true": True, "false": False, "none": None}.get(value.lower(), value) if isinstance(value, str) else value


def _words_of(switch: Any) -> list[str]:
    """Return the words of `fsdp` that name something; it may also be a plain switch."""
    given = switch.split() if isinstance(switch, str) else switch if isinstance(switch, list | tuple) else ()
    return [str(word) for word in given if str(word).lower() not in ("auto_wrap", "true")]


def _level_of(
    said: Sequence[tuple[str, Location, Any]], version: int, translation: Translation, *, launched: bool
) -> Sharding:
    """Return the level at which accelerate shards; `said` are the names, locations and values that speak of it.

    FSDP2 reads `reshard_after_forward`, or else the words of `fsdp`. FSDP1 reads `sharding_strategy`, which is the
    launcher's alone: without a launcher accelerate shards by full_shard.
    """
    levels: list[tuple[str, Location, Sharding]] = []
    for name, where, value in said:
        try:
            levels.append((name, where, _read_level(name, value, version, launched=launched)))
        except ValueError as error:
            translation.refuse(where, str(error))
    deciding = (RESHARDS, "fsdp") if version == 2 else (STRATEGY,) if launched else ()
    ranked = [level for decides in deciding for name, _, level in levels if name == decides]
    level = ranked[0] if ranked else Sharding.ZERO3
    measured = next(strategy for strategy, each in STRATEGIES.items() if each is level)
    for _, where, other in levels:
        if other is not level:
            named = ".".join(map(str, where))
            translation.notes.append(f"{named}: changes nothing in FSDP{version}, which is measured as {measured}")
    return level


def _read_level(name: str, value: Any, version: int, *, launched: bool) -> Sharding:
    """Return the level of a strategy, or of whether parameters are freed after forward. Raises ValueError."""
    if name == RESHARDS and isinstance(value, bool) and (launched or version == 2):
        return Sharding.ZERO3 if value else Sharding.ZERO2
    if name == RESHARDS and (version == 2 or isinstance(value, bool)):
        raise ValueError("FSDP2 takes true or false" if version == 2 else "FSDP1 takes no truth value: remove it")
    strategy = str(_BY_NUMBER.get(int(value)) if str(value).isdecimal() else value).lower()
    if strategy == "offload":
        raise ValueError(f"{Why.OFFLOADING}: leave offload out")
    if strategy in _HYBRID:
        raise ValueError(f"{strategy}: {Why.HYBRID}: say full_shard")
    if strategy not in STRATEGIES:
        raise ValueError(f"{shortened(strategy)} is not supported; supported: {', '.join((*STRATEGIES, 'auto_wrap'))}")
    if name == "fsdp" and version == 2 and value not in _OF_FSDP2:
        raise ValueError(f"{shortened(value)} is not of FSDP2: say {' or '.join(_OF_FSDP2)}")
    return STRATEGIES[strategy]


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
    config = {"version": 2, RESHARDS: settings.sharding is Sharding.ZERO3}
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


def read_accelerator_config(value: Any) -> None:
    """Read accelerate's settings. Raises ValueError for those that would change the batch."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = json.loads(value)
    config = {} if value is None else value if isinstance(value, Mapping) else None
    if config is None:
        is_path = isinstance(value, str)
        raise ValueError("is the path of a file: put its content here" if is_path else "must be a mapping")
    if config.get("split_batches"):
        raise ValueError("split_batches divides the micro-batch by the number of processes: remove it")
    kept = config.get("gradient_accumulation_kwargs")
    if isinstance(kept, Mapping) and kept.get("num_steps") not in (None, 1):  # the Trainer writes 1 itself
        raise ValueError("num_steps replaces gradient_accumulation_steps: say it there")


FSDP_CONFIG = Key(Setting.FSDP_CONFIG, contents("the mapping of FSDP's keys"), fsdp_config)
ACCELERATOR_CONFIG = Key(read=read_accelerator_config, write=_accelerator_config)
FSDP: Mapping[str, Key] = {
    "fsdp": Key(Setting.FSDP, lambda value: value or None, lambda settings: fsdp_config(settings) and True),
    "fsdp_config": FSDP_CONFIG,
    "accelerator_config": ACCELERATOR_CONFIG,
}
"""The keys of TrainingArguments."""
