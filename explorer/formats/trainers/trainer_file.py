"""What a trainer's own file may say: the settings that a request has a place for, and how a key's value is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bexp.explorer.model.spelling import shortened

Read = Callable[[Any], Any]
"""Returns what a value sets, or None if it sets nothing. Raises ValueError with the reason if it is not measured."""


class Setting(StrEnum):
    """What a key sets. Several keys may set one thing."""

    MODEL = "model"
    MICRO_BATCH_SIZE = "micro_batch_size"
    STEPS = "grad_accum_steps"
    DEVICE_BATCH = "batch of a device"
    DEVICES = "num_devices"
    SEQ_LENGTH = "seq_length"
    OPTIMIZER = "optimizer"
    HALF = "computes in bfloat16"
    PURE = "all weights in bfloat16"
    WEIGHTS = "dtype of the weights"
    ADAPTERS = "trains adapters"
    R = "r"
    ALPHA = "alpha"
    DROPOUT = "dropout"
    MODULES = "target_modules"
    PARAMETERS = "target_parameters"
    SAVED = "modules_to_save"
    RESIZED = "other vocabulary"
    DORA = "use_dora"
    RSLORA = "use_rslora"
    BITS = "bits of a weight"
    NESTED = "quantised scales"
    PACKING = "packing"
    PADDING_FREE = "padding_free"
    FULL_ROWS = "rows of full length"
    PRETRAINING = "pretraining"
    ORDER = "grouped by length"
    COMPILE = "torch_compile"
    LOSS = "loss"
    RECOMPUTATION = "recomputation"
    RECOMPUTATION_DETAILS = "arguments of recomputation"
    ATTENTION = "attention"
    EXPERTS = "experts"


EXPLORED = (Setting.RECOMPUTATION, Setting.ATTENTION, Setting.EXPERTS)
"""What an exploration chooses beside the micro-batch, whatever a file says."""
QLORA = "qlora"
"""Adapters beside weights in 4 bits, and no others."""
Key = tuple[Setting | None, Read]


@dataclass(frozen=True, slots=True)
class Formats:
    """What a file says of number formats. `weights` is None if it says nothing; `checkpoint` is that of config.json."""

    half: bool
    pure: bool
    weights: str | None
    checkpoint: str
    has_adapters: bool
    is_quantized: bool


@dataclass(frozen=True, slots=True)
class TrainerFile:
    """How a trainer's own file is read.

    `model` is the key that names the base model, by which the file is known. `settings` are the keys that are read, in
    dotted form where they are nested; `defaults` what the trainer takes if none of them is there, and `alpha_by_rank`
    how often an adapter's alpha has its rank then. `formats` returns the dtype of the products and the precision, None
    for the trainer's default. Of other keys, `refused` change speed or
    memory in a way that is not measured, each with the reason, and `harmless` change neither. Both may be patterns such
    as `wandb_*`. `other_losses` are measured as the library's loss, each with what is to be known. `shards` says that
    several devices share parameters and states. `note` is for everyone.
    """

    model: str
    settings: Mapping[str, Key]
    formats: Callable[[Formats], tuple[str, str | None]]
    refused: Mapping[str, str]
    harmless: frozenset[str]
    defaults: Mapping[Setting, Any] = field(default_factory=dict)
    alpha_by_rank: int = 1
    other_losses: Mapping[str, str] = field(default_factory=dict)
    is_nested: bool = False
    shards: bool = False
    note: str | None = None


def flag(value: Any) -> bool:
    """Read true or false."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError("must be true or false")  # noqa: TRY004 - a value of the file, not of the code
    return value


def number(value: Any) -> int:
    """Read a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise ValueError("must be a whole number from 1 on")
    return value


def same(value: Any) -> Any:
    """Read a value as it is; the rules of a request check it."""
    return value


def negated(value: Any) -> bool:
    """Read what switches something off."""
    return not flag(value)


def if_on(result: Any) -> Read:
    """Return a reader of a switch that sets `result` where it is on, and nothing where it is off."""
    return lambda value: result if flag(value) else None


def names(value: Any) -> Any:
    """Read a list of names, or a text of names between commas; `all` stands for `all-linear`."""
    if isinstance(value, str):
        found = [name.strip() for name in value.split(",") if name.strip()]
        return "all-linear" if found in (["all"], ["all-linear"]) else found
    return value


def one_of(known: Mapping[str, Any], words: str = "is not measured") -> Read:
    """Return a reader of texts, each of which stands for something in `known`."""

    def read(value: Any) -> Any:
        if str(value).lower() not in known:
            raise ValueError(f"'{shortened(value)}' {words}; these are: {', '.join(known)}")
        return known[str(value).lower()]

    return read


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def because(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reason of each key, from the keys of each reason, between spaces."""
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


def must_be(*allowed: Any, reason: str) -> Key:
    """Return a key that sets nothing, and has one of the `allowed` values."""

    def read(value: Any) -> None:
        if value not in allowed:
            raise ValueError(reason)

    return None, read


KERNELS = "these kernels are not measured for this trainer: remove it"
SHARDING = (
    "sharding and its launcher are not read from this file: remove it here, and say --num-devices with "
    "--set training.sharding=zero2 or zero3"
)
PARALLEL = "devices that share a sequence, a layer or a pipeline are not measured for this trainer"
OFFLOADING = "what moves to the host's memory is not measured"
OTHER_TRAINING = "only supervised fine-tuning, with the loss of the next token, is measured"
OTHER_WEIGHTS = "other number formats of weights are not measured; those of bitsandbytes in 4 and 8 bits are"
OTHER_ADAPTERS = "such adapters are not measured: LoRA, DoRA and rsLoRA of new adapters are"
OTHER_OPTIMIZER = "this optimizer is not measured: see `bexp explore --help` (--optim), or `bexp tune -- COMMAND`"
OTHER_LOSS = "this loss is not measured"
OTHER_MODEL = "the model is measured as its config.json says: make the change there"
PART_OF_WEIGHTS = "training a part of the weights is not measured; all of them, or LoRA, are"
