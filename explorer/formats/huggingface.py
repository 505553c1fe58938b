"""A Hugging Face config.json as a ModelSpec, for model types whose parameter count comes out exactly.

Fields are read as transformers reads them, including its defaults. Fields that change neither shapes nor kernels are
ignored (`IGNORED`). Dropout is one of them: GPT-2's default in transformers is 0.1, and no exploration runs it. So is
the coefficient of the router's balancing loss, whose time is not measured. Every other field must be known or unset;
otherwise it is refused by name.

For target `transformers` a config.json stays as it is, with all values that a class of the library may build with. Not
all such keys are known, because a worker's version of the library may be newer. So short values of any key are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bexp.explorer.formats import families
from bexp.explorer.formats.families import FAMILIES, Family
from bexp.explorer.formats.model_types import model_types, refuse_other_model, reserved_positions
from bexp.explorer.model.base import FieldPath
from bexp.explorer.model.config_rules import LABELS, LONGEST_TEXT, TOO_LONG, cleaned
from bexp.explorer.model.model import find_layer_pattern
from bexp.explorer.model.optimizers import BITSANDBYTES
from bexp.explorer.model.quantization import own_method
from bexp.explorer.model.spelling import did_you_mean, shortened
from bexp.explorer.model.target import BEXP
from bexp.explorer.model.translation import Location, Section, Translation
from bexp.explorer.request.explored import name_of_config

DEFAULT_SEQ_LENGTH = 4096
"""The longest sequence that is assumed if config.json states only a maximum; `seq_length` overrides it."""

POSITION_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "max_target_positions"),
)

OWN_FIELDS = ("name", "seq_length")
"""Fields of ours that may stand next to those of a config.json."""


def pass_config(config: Mapping[str, Any], location: Location, translation: Translation, seq_length: Any) -> None:
    """Set `hf_config` of `translation` to the config.json at `location`, unchanged.

    Our own fields `name` and `seq_length` may stand next to transformers'. The argument `seq_length` overrides them.
    Without either it is the smaller of the longest sequence that the model can take and 4096 tokens.
    """
    values = dict(config)
    own = values.pop("seq_length", None)
    if "name" in values:
        values["_name_or_path"] = values.pop("name")
    translation.put(("hf_config",), values, location)
    if seq_length is not None:
        translation.put(("hf_seq_length",), seq_length)
    elif own is not None:
        translation.put(("hf_seq_length",), own, (*location, "seq_length"))
    else:
        assume_seq_length(values, translation, location)


def assume_seq_length(config: Mapping[str, Any], translation: Translation, location: Location | None = None) -> None:
    """Set and note `hf_seq_length`: the smaller of the longest sequence that a config.json names and 4096 tokens."""
    named = _named_lengths(config)
    assumed = min([*named.values(), DEFAULT_SEQ_LENGTH])
    translation.put(("hf_seq_length",), assumed, location)
    _note_assumed_length(translation, assumed, max(named.values(), default=None))


def _named_lengths(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of tokens that have a position, by the key that states it, or the default of the class."""
    text = config.get("text_config")
    sections = [config, *([text] if isinstance(text, Mapping) else [])]
    lengths = {key: section.get(key) for section in sections for key in POSITION_KEYS}
    reserved = reserved_positions(config)
    named = {key: n - reserved for key, n in lengths.items() if isinstance(n, int) and n > reserved and n is not True}
    family = FAMILIES.get(str(config.get("model_type")))
    if not named and family is not None and config["model_type"] in model_types().bounded:
        return {family.positions_key: family.defaults[family.positions_key]}
    return named


def check_length(config: Mapping[str, Any], length: Any, translation: Translation) -> None:
    """Refuse or note a sequence that is longer than the positions of a config.json.

    It is refused if the class of the model has no more positions. Rotary positions have no end.
    """
    named = _named_lengths(config)
    longest = max(named.values(), default=None)
    if longest is None or not isinstance(length, int) or length <= longest:
        return
    key, reserved = max(named, key=named.__getitem__), reserved_positions(config)
    less = f" less {reserved} that no token has" if reserved else ""
    said = f"{length:,} tokens are more than the {longest:,} positions of the model ({key}{less})"
    if str(config.get("model_type")) in model_types().bounded:
        translation.refuse(translation.sources.get(("hf_seq_length",), ("hf_seq_length",)), f"{said}; it has no others")
    else:
        _note_long_sequence(config, said, translation)


def _note_long_sequence(config: Mapping[str, Any], said: str, translation: Translation) -> None:
    """Note a sequence beyond the positions that a model was trained with, unless they are scaled."""
    text = config.get("text_config")
    for section in (config, text if isinstance(text, Mapping) else {}):
        for key in ("rope_scaling", "rope_parameters"):
            rope = section.get(key)
            if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type", "default")) != "default":
                return
    translation.notes.append(f"{said}; they are measured, and the model has not seen such positions")


def _note_assumed_length(translation: Translation, assumed: int, longest: int | None) -> None:
    """Note an assumed length that is not the longest one, because the answer depends on it."""
    if assumed == longest:
        return
    why = "" if longest is None else f", although config.json allows {longest:,}"
    translation.notes.append(f"a sequence is assumed to have {assumed:,} tokens{why}: --seq-length sets it")


def translate_config(
    config: Mapping[str, Any], location: Location, translation: Translation, seq_length: Any = None
) -> None:
    """Set `model` of `translation` from the config.json at `location`.

    Our own fields `name`, `seq_length` and `dtype` may stand next to transformers'. The argument `seq_length` overrides
    them. Without either it is the smaller of the longest sequence that the model can take and 4096 tokens.
    """
    model = translation.section(config, location)
    if refuse_other_model(model, BEXP):
        return
    model_type = model.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        why = families.UNSUPPORTED_TYPES.get(model_type) if isinstance(model_type, str) else None
        model.refuse(
            "model_type",
            f"{shortened(repr(model_type))} is not supported by target 'bexp'{f' (it has {why})' if why else ''}"
            f"{did_you_mean(str(model_type), FAMILIES)}; supported: {', '.join(FAMILIES)}; "
            "target 'transformers' measures other types",
        )
        return
    model.refuse_where_set(
        {key: reason for key, reason in families.REFUSED.items() if model.values.get(key) != families.NEUTRAL.get(key)}
    )
    model = _rename(model, family)
    defaults = family.defaults
    for name, key in family.keys.items():
        model.take(key, ("model", name), defaults.get(key))
    for name, value in family.fixed.items():
        translation.put(("model", name), value)
    model.ignore(
        {"num_key_value_heads"} & set(defaults) - set(family.keys.values()) if model_type == "gpt_neox" else ()
    )
    translation.put(
        ("model", "activation"),
        model.choice(family.activation_key, families.ACTIVATIONS, defaults[family.activation_key]),
        model.at(family.activation_key),
    )
    _take_name(model, str(model_type))
    _take_dtype(model)
    _take_rotary(model, str(model_type))
    if model_type == "gpt2":
        inner = model.integer("n_inner") or 4 * (model.integer("n_embd", defaults["n_embd"]) or 0)
        translation.put(("model", "ffn_hidden_size"), inner, model.at("n_inner"))
    if family.moe_keys:
        _take_experts(model, family)
    _take_seq_length(model, family, seq_length)
    _check_windows(model, family)
    model.ignore(families.IGNORED)
    reason = f"is not a known field of {model_type}; remove it if it changes no shape"
    model.refuse_unread(reason, {**defaults, **families.NEUTRAL})


def _rename(model: Section, family: Family) -> Section:
    values = dict(model.values)
    for alias, key in family.aliases.items():
        if alias in values:
            value = values.pop(alias)
            if values.setdefault(key, value) != value:
                model.refuse(alias, f"contradicts {key}, which is the same field")
    return Section(model.translation, values, model.location, model.read)


def _take_name(model: Section, model_type: str) -> None:
    model.get("_name_or_path")
    model.take("name", ("model", "name"), name_of_config({**model.values, "model_type": model_type}))


def _take_dtype(model: Section) -> None:
    legacy = model.get("torch_dtype")
    dtype = model.get("dtype", legacy)
    if dtype in (None, "auto"):
        return
    key = "dtype" if "dtype" in model else "torch_dtype"
    if isinstance(dtype, str) and dtype in families.DTYPES:
        model.translation.put(("model", "dtype"), families.DTYPES[dtype], model.at(key))
    else:
        model.refuse(key, f"{shortened(repr(dtype))} is not supported; supported: bfloat16, float16, float32")


def _take_rotary(model: Section, model_type: str) -> None:
    """Read the rotated part of a head: only GPT-NeoX has one, and its config class assumes a quarter."""
    parameters = model.section("rope_parameters")
    named = [
        (section, key)
        for section, key in (
            (parameters, "partial_rotary_factor"),
            (model, "partial_rotary_factor"),
            (model, "rotary_pct"),
        )
        if section.get(key) is not None
    ]
    if model_type == "gpt_neox":
        fraction = named[0][0].get(named[0][1]) if named else 0.25
        source = named[0][0].at(named[0][1]) if named else None
        model.translation.put(("model", "rotary_fraction"), fraction, source)
        return
    for section, key in named:
        if section.get(key) != 1:
            section.refuse(key, f"partial rotary embeddings are not supported for {model_type}")


def _take_experts(model: Section, family: Family) -> None:
    translation, defaults = model.translation, family.defaults
    num_layers = model.integer(family.keys["num_layers"], defaults["num_hidden_layers"], largest=4096)
    experts_key = family.moe_keys["num_experts"]
    num_experts = model.integer(experts_key, defaults[experts_key])
    first_k_dense, frequency = 0, 1
    if family.sparse_step and num_layers:
        step = model.integer("decoder_sparse_step", 1)
        dense = model.get("mlp_only_layers") or []
        if step == 0:
            model.refuse("decoder_sparse_step", "must be at least 1")
        if not isinstance(dense, list | tuple):
            model.refuse("mlp_only_layers", "must be a list of layer indices")
            dense = []
        without = {i for i in dense if isinstance(i, int)}
        kinds = [bool(num_experts) and i not in without and (i + 1) % (step or 1) == 0 for i in range(num_layers)]
        pattern = find_layer_pattern(kinds)
        if pattern is None:
            model.refuse(
                "mlp_only_layers",
                "only dense layers at the start, followed by experts in every n-th layer, are supported",
            )
        else:
            first_k_dense, frequency = pattern
        if not any(kinds):
            model.ignore(family.moe_keys.values())
            return
    for name, key in family.moe_keys.items():
        model.take(key, ("model", "moe", name), defaults.get(key))
    for name, value in family.moe_fixed.items():
        translation.put(("model", "moe", name), value)
    translation.put(("model", "moe", "first_k_dense"), first_k_dense, model.at("mlp_only_layers"))
    translation.put(("model", "moe", "moe_layer_frequency"), frequency, model.at("decoder_sparse_step"))


def _take_seq_length(model: Section, family: Family, seq_length: Any) -> None:
    key = family.positions_key
    reach = model.integer(key, family.defaults[key])
    own = model.get("seq_length")
    if seq_length is not None:
        model.translation.put(("model", "seq_length"), seq_length)
    elif own is not None:
        model.translation.put(("model", "seq_length"), own, model.at("seq_length"))
    elif reach is not None:
        assumed = min(reach, DEFAULT_SEQ_LENGTH)
        model.translation.put(("model", "seq_length"), assumed, model.at(key))
        _note_assumed_length(model.translation, assumed, reach)
    length = model.translation.get("model", "seq_length")
    if family.fixed.get("position") != "learned" and isinstance(length, int) and reach is not None and length > reach:
        said = f"{length:,} tokens are more than the {reach:,} positions of the model ({key})"
        _note_long_sequence(model.values, said, model.translation)


def _check_windows(model: Section, family: Family) -> None:
    """Refuse a sliding window that is shorter than a sequence; a longer one masks nothing."""
    if family.window is None:
        return
    defaults = family.defaults
    window = model.integer("sliding_window", defaults.get("sliding_window"))
    types = model.get("layer_types") or []
    if family.window == "switched":
        switched = model.boolean("use_sliding_window")
        first = model.integer("max_window_layers", defaults.get("max_window_layers"))
        num_layers = model.integer(family.keys["num_layers"], defaults["num_hidden_layers"])
        if not switched or (first is not None and "max_window_layers" in defaults and first >= (num_layers or 0)):
            window = None
    if not isinstance(types, list | tuple) or any(
        kind not in ("full_attention", "sliding_attention") for kind in types
    ):
        model.refuse("layer_types", "only full_attention is supported")
    elif types and "sliding_attention" not in types:
        window = None
    length = model.translation.get("model", "seq_length")
    if window is not None and isinstance(length, int) and length > window:
        assumed = "" if "sliding_window" in model else ", transformers' default for this model type,"
        model.refuse(
            "sliding_window",
            f"a sliding window ({window}){assumed} shorter than seq_length ({length}) is not supported; "
            "set it to null, or seq_length to the window",
        )


UNREAD = LABELS | {"task_specific_params", "finetuning_task"}
"""Keys that no causal language model reads, and that are long in published files."""

LONG = TOO_LONG
NAMES = "the library's own class is measured, and no code, repository or path is passed to it"

LARGEST_BYTES = 32 * 1024
"""Published files are smaller than this without the values that are left out."""


def keep_what_is_read(config: Mapping[str, Any], translation: Translation, *, by_library: bool) -> None:
    """Leave out of `hf_config` names of code, of a repository or of a path, and long texts; note both.

    `auto_map` names the code of a model that was published before the library had its class. The worker builds the
    library's class of the same `model_type`, or reports that the library has none.

    For target `transformers`, values that no measurement reads are left out as well, and a file that is large without
    them is refused. Of a quantisation that is not measured, the name of the method stays.
    """
    kept = {key: value for key, value in config.items() if not by_library or key not in UNREAD}
    method = own_method(kept)
    if by_library and method not in (None, BITSANDBYTES):
        kept["quantization_config"] = {"quant_method": None if method == "?" else str(method)[:LONGEST_TEXT]}
    left_out: dict[str, dict[str, None]] = {LONG: {}, NAMES: {}}

    def note(path: FieldPath, reason: str) -> None:
        left_out[LONG if reason == TOO_LONG else NAMES][".".join(map(str, path))] = None

    kept = cleaned(kept, note)
    for reason, places in left_out.items():
        if places:
            others = f" and {len(places) - 1} more" if len(places) > 1 else ""
            translation.notes.append(f"{shortened(next(iter(places)))}{others} of config.json left out: {reason}")
    if by_library:
        _refuse_large(kept, translation)
    translation.put(("hf_config",), kept)


def _refuse_large(config: Mapping[str, Any], translation: Translation) -> None:
    sizes = {key: len(json.dumps(value, default=str)) for key, value in config.items()}
    if sum(sizes.values()) > LARGEST_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        translation.refuse(
            translation.sources.get(("hf_config",), ("hf_config",)),
            f"config.json is larger than {LARGEST_BYTES // 1024} KiB, without labels and long texts; "
            f"{shortened(largest)} alone has {sizes[largest] / 1024:.0f} KiB: leave out what its class does not read",
        )
