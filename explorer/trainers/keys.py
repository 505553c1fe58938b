"""A trainer's own file: the settings of its keys, which read a person's file and write an export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.optimizers import LIBRARY_NAMES
from bexp.explorer.model.spelling import shortened
from bexp.explorer.model.translation import Section
from bexp.explorer.trainers.document import TrainerSettings

Read = Callable[[Any], Any]
"""Returns the meaning of a value, or None without one. Raises ValueError with the reason if it is not measured."""
Write = Callable[[TrainerSettings], Any]
"""Returns the value of a key in an export, or None if it is left out there."""
Batch = tuple[int, int]
"""Sequences of a device's micro-step, and its accumulation steps."""
ReadSideFile = Callable[[Section, int, Batch | None], Batch | None]
"""Reads a file of the training side that is given with a model, into the section's translation.

It gets the number of devices, and the batch of another such file if there is one. It returns the batch of both.
"""
IN_A_COMMAND = "measure it in your own command, with `bexp tune -- COMMAND`"
UNKNOWN_FIELD = "is not a known field; remove it if it changes neither time nor memory"


class Setting(StrEnum):
    """The meaning of a key. Several keys may have one meaning."""

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
    DEEPSPEED = "DeepSpeed"
    FSDP = "FSDP"
    FSDP_CONFIG = "keys of FSDP"
    FSDP_VERSION = "version of FSDP"
    LAUNCH = "configuration of accelerate launch"


class Why(StrEnum):
    """Why a key of a file is refused where it is set."""

    KERNELS = f"these kernels are not measured for this trainer: remove it, or {IN_A_COMMAND}"
    PARALLEL = "devices that share a sequence, a layer or a pipeline are not measured for this trainer"
    OFFLOADING = "what moves to the host's memory is not measured"
    HYBRID = "hierarchical sharding, within groups of devices, is not measured"
    OTHER_TRAINING = "only supervised fine-tuning, with the loss of the next token, is measured"
    OTHER_WEIGHTS = "other number formats of weights are not measured; those of bitsandbytes in 4 and 8 bits are"
    OTHER_ADAPTERS = "such adapters are not measured: LoRA, DoRA and rsLoRA of new adapters are"
    OTHER_OPTIMIZER = "this optimizer is not measured: see `bexp explore --help` (--optim), or `bexp tune -- COMMAND`"
    OTHER_LOSS = "this loss is not measured"
    OTHER_MODEL = "the model is measured as its config.json says: make the change there"
    SLOWER = "it makes steps slower or smaller than is measured: remove it"
    PART_OF_WEIGHTS = "training a part of the weights is not measured; all of them, or LoRA, are"


EXPLORED = (Setting.RECOMPUTATION, Setting.ATTENTION, Setting.EXPERTS)
"""The choices of an exploration in addition to the micro-batch, whatever a file says."""
LORA_FIELDS = (
    *(Setting.R, Setting.ALPHA, Setting.DROPOUT, Setting.MODULES, Setting.PARAMETERS, Setting.SAVED),
    *(Setting.DORA, Setting.RSLORA),
)
"""Settings that are fields of a request's `training.lora`, by their values."""
QLORA = "qlora"
"""Adapters over weights in 4 bits, and no others."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a trainer's own file."""

    setting: Setting | None = None
    """The meaning; None where a request has no field for it."""
    read: Read | None = None
    """None: a value is taken as it is, if the key has a setting."""
    write: Write | None = None
    """None: the key is only read, such as an older name."""

    @property
    def is_read(self) -> bool:
        """Whether the key is read. One that is only written is refused, harmless or unknown in a person's file."""
        return self.setting is not None or self.read is not None


@dataclass(frozen=True, slots=True)
class Formats:
    """The number formats that a file states."""

    half: bool
    pure: bool
    weights: str | None
    """None if the file states none."""
    checkpoint: str
    """The format in config.json."""
    has_adapters: bool
    is_quantized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFile:
    """The table of a trainer's own file, which is read with the config.json of its base model."""

    model: str
    """The key that names the base model, by which the file is recognised."""
    keys: Mapping[str, Key]
    """The keys that are read or written, in the order of an export; dotted where they are nested."""
    formats: Callable[[Formats], tuple[str, str | None]]
    """Returns the dtype of the products and the precision, which is None for the trainer's default."""
    refused: Mapping[str, str]
    """Other keys, which change speed or memory in a way that is not measured, each with the reason; or patterns."""
    harmless: frozenset[str]
    """Other keys, which change neither; or patterns such as `wandb_*`."""
    defaults: Mapping[Setting, Any] = field(default_factory=dict)
    """The trainer's defaults."""
    alpha_by_rank: int = 1
    """The default of an adapter's alpha, as a multiple of its rank."""
    other_losses: Mapping[str, str] = field(default_factory=dict)
    """Losses that are measured as the library's, each with a note on the difference."""
    is_nested: bool = False
    shards: bool = False
    """Whether several devices share parameters and states."""
    fsdp_versions: tuple[int, ...] = (2, 1)
    """The versions of FSDP that the trainer has, first the one where the file states none."""
    fsdp_needs_switch: bool = True
    """Whether the keys of FSDP do nothing without `fsdp`."""
    widens_fsdp: bool = True
    """Whether FSDP makes weights float32 that are computed with in bfloat16."""
    note: str | None = None
    """A note on every such file."""
    program: str | None = None
    """A pattern of the program that starts the trainer with its file; None if `bexp tune` changes no such file."""

    def __post_init__(self) -> None:
        """Raise TypeError if nothing says with which optimizer a file trains that names none."""
        if Setting.OPTIMIZER not in {*self.defaults, *(key.setting for key in self.keys.values())}:
            raise TypeError(f"no key of the file of '{self.model}' is the optimizer, and `defaults` has none")

    def name_of(self, setting: Setting) -> str:
        """Return the key that an export writes for a setting."""
        return next(name for name, key in self.keys.items() if key.setting is setting and key.write is not None)


def _of_adapters(setting: Setting) -> Write:
    """Return the writer of a field of `training.lora`; it returns None where the field asks for nothing."""

    def value(settings: TrainerSettings) -> Any:
        lora = settings.lora
        if lora is not None and setting is Setting.ALPHA and lora.alpha is None:
            return lora.r
        return getattr(lora, setting.value, None) or None

    return value


_VALUES: Mapping[Setting, Write] = {
    Setting.MICRO_BATCH_SIZE: lambda settings: settings.micro_batch_size,
    Setting.STEPS: lambda settings: settings.grad_accum_steps,
    Setting.SEQ_LENGTH: lambda settings: settings.seq_length if settings.states_length else None,
    Setting.OPTIMIZER: lambda settings: None if settings.is_own_code else LIBRARY_NAMES.get(settings.optimizer),
    **{setting: _of_adapters(setting) for setting in LORA_FIELDS},
    Setting.BITS: lambda settings: settings.lora and settings.quantization and settings.quantization.bits,
    Setting.PACKING: lambda settings: None if settings.batching is None else settings.batching == "packed",
    Setting.COMPILE: lambda settings: settings.compiled_layers,
    Setting.RECOMPUTATION: lambda settings: settings.recompute is not Recompute.NONE,
    Setting.ATTENTION: lambda settings: settings.attention,
    Setting.EXPERTS: lambda settings: settings.experts,
}
"""The writers of an export by setting; they return None where an export leaves the key out."""


def key(setting: Setting, read: Read | None = None, write: Callable[[Any], Any] = lambda value: value) -> Key:
    """Return a key of both directions; `write` gets a result of `read`, and undoes it."""

    def written(settings: TrainerSettings) -> Any:
        value = _VALUES[setting](settings)
        return None if value is None else write(value)

    return Key(setting, read, written)


def without_exports(keys: Mapping[str, Key]) -> dict[str, Key]:
    """Return the same keys, which are read but not written."""
    return {name: replace(known, write=None) for name, known in keys.items() if known.is_read}


def fields_of(keys: Mapping[str, Key], settings: TrainerSettings) -> dict[str, Any]:
    """Return the fields of an export, in the order of `keys`."""
    values = ((name, known.write(settings)) for name, known in keys.items() if known.write is not None)
    return {name: value for name, value in values if value is not None}


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


def contents(what: str) -> Read:
    """Return a reader of a mapping, or of the path of its file; `what` names it. It returns None where it is empty."""

    def read(value: Any) -> Any:
        if value and not isinstance(value, str | Mapping):
            raise ValueError(f"must be {what}, or its path")
        return value or None

    return read


def negated(value: Any) -> bool:
    """Read or write a key that switches something off."""
    return not flag(value)


def if_on(result: Any) -> Read:
    """Return a reader of a switch that sets `result` where it is on, and nothing where it is off."""
    return lambda value: result if flag(value) else None


def turns_on(result: Any) -> Callable[[Any], bool | None]:
    """Return a writer of a switch: the reverse of `if_on`."""
    return lambda value: True if value == result else None


def names(value: Any) -> Any:
    """Read a list of names, or a text of names between commas; one name may be `all-linear`."""
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(value, list):
        raise ValueError("must be a list of names")  # noqa: TRY004 - a value of the file, not of the code
    return "all-linear" if value == ["all-linear"] else value


def one_of(known: Mapping[str, Any]) -> Read:
    """Return a reader of texts, each of which has a value in `known`."""

    def read(value: Any) -> Any:
        if str(value).lower() not in known:
            raise ValueError(f"'{shortened(value)}' is not measured; these are: {', '.join(known)}")
        return known[str(value).lower()]

    return read


def is_among(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a key is one of the names, some of which are patterns such as `wandb_*`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def because(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reason of each key, from the keys of each reason, which stand between spaces."""
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


def must_be(*allowed: Any, reason: str, write: Write | None = None) -> Key:
    """Return a key that sets nothing and must have one of the `allowed` values."""

    def read(value: Any) -> None:
        if value not in allowed:
            raise ValueError(reason)

    return Key(None, read, write)
