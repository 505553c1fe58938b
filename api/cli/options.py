"""Options that `explore` and `submit` share. They override the configuration file."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from bexp.api.cli.arguments import parse_labels
from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.cli.files import read_document, read_lengths, with_model
from bexp.explorer.dimensions.candidate import DimensionsAsked
from bexp.explorer.formats.document import FormatError, read_field
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.lengths import Batching
from bexp.explorer.model.target import name_local_target
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.trainers.registry import FILES, TRAINERS, TrainerName

Mode = Literal["train", "eval"]
ExecutionMode = Literal["eager", "compile", "graph", "compile+graph", "explore"]
Prefer = Literal["speed", "memory"]


def _default(field: str, otherwise: str | None = None) -> str:
    """Return the value of a field that neither CONFIG nor an option states."""
    plain = {name: field.default for name, field in ExplorationRequest.model_fields.items()}
    value = {**plain["budget"].model_dump(), **plain}[field] if otherwise is None else otherwise
    return f"{value:g}" if isinstance(value, float) else str(value)


def _one_of(names: Iterable[str]) -> str:
    """Return names in a row, the last one after `or`."""
    *others, last = names
    return f"{', '.join(others)} or {last}"


BATCH, TRAINING, CHOICES, SEARCH, OUTPUT = "Batch and texts", "Training", "What may be chosen", "Search", "Output"
"""The panels of the help."""
FLAG = ""
"""The value of an option that takes none."""


def _option(panel: str, value: str, text: str, default: str | None = None, name: str | None = None) -> Any:
    """Return an option of a panel. `default` holds where neither CONFIG nor the option gives a value."""
    said = text if default is None else f"{text} Default: {default}."
    names = () if name is None else (name,)
    return typer.Option(*names, metavar=value, help=said, show_default=False, rich_help_panel=panel)


Config = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="A request (YAML or JSON); a config.json of Hugging Face or its folder; a Cerebras or NeMo YAML; "
        f"Megatron's flags; a YAML of {_one_of(TRAINERS[name].title for name in FILES)}; - reads stdin. "
        "Options replace what it says; defaults hold where neither says anything.",
        show_default=False,
    ),
]
MicroBatchSize = Annotated[
    str | None,
    _option(
        BATCH,
        "SIZES",
        "A range (2-16), a list (2,4,8), auto (divisors of the batch) or explore.",
        "auto with a batch size, else explore",
    ),
]
BatchSize = Annotated[
    int | None,
    _option(BATCH, "N", "The effective batch, over all devices.", _default("batch_size", "none")),
]
NumDevices = Annotated[int | None, _option(BATCH, "N", "Devices that share the batch.", _default("num_devices"))]
SeqLength = Annotated[int | None, _option(BATCH, "N", "Tokens in a sequence.")]
LengthsOption = Annotated[
    str | None,
    _option(
        BATCH,
        "FILE",
        "How many tokens texts have: a file of lengths or a JSON histogram, or lognormal(MEAN,SIGMA).",
        "every sequence is full",
    ),
]
BatchingOption = Annotated[
    Batching | None,
    _option(BATCH, "HOW", f"What becomes of such texts: {_one_of(get_args(Batching))}.", "padded"),
]
ModeOption = Annotated[Mode | None, _option(TRAINING, "HOW", "train, or eval: forwards alone.", _default("mode"))]
OptimizerOption = Annotated[
    str | None,
    _option(
        TRAINING,
        "NAME",
        "The optimizer, by its name in transformers' TrainingArguments, such as adamw_bnb_8bit.",
        "adamw_torch_fused",
        "--optim",
    ),
]
QuantizationOption = Annotated[
    str | None,
    _option(
        TRAINING,
        "NAME",
        "Weights of a config.json as bitsandbytes loads them: bnb_4bit, bnb_8bit, none. Training needs training.lora.",
        "as the config.json says",
    ),
]
TrainerOption = Annotated[
    TrainerName | None,
    _option(
        TRAINING,
        "NAME",
        f"Who will run the answer; only settings that it can express are explored: {_one_of(TrainerName)}.",
        "bexp, which is any loop with bexp.apply",
    ),
]
ModelOption = Annotated[
    Path | None,
    _option(
        TRAINING,
        "PATH",
        "The config.json, or its folder, of the base model that a trainer's YAML names on the hub.",
        name="--model",
    ),
]
LaunchOption = Annotated[
    Path | None,
    _option(
        TRAINING,
        "FILE",
        "accelerate launch's YAML: processes, sharding.",
        name="--accelerate",
    ),
]
_TARGET = "transformers for a config.json, bexp for shapes"
TargetOption = Annotated[
    str | None,
    _option(TRAINING, "NAME", "Whose training step is measured: bexp, transformers, or a registered one.", _TARGET),
]
LocalTargetOption = Annotated[
    str | None,
    _option(
        TRAINING,
        "NAME",
        "Whose training step is measured: bexp, transformers, a registered one, or a class of yours as FILE.py:NAME.",
        _TARGET,
        "--target",
    ),
]
ExecutionOption = Annotated[
    ExecutionMode | None,
    _option(
        CHOICES,
        "MODE",
        "eager, compile (layers by torch.compile), graph (CUDA graphs), compile+graph, or explore: the fastest.",
        "explore on a GPU, eager on a CPU",
    ),
]
Quick = Annotated[
    bool,
    _option(
        CHOICES, FLAG, "Eager code and the library's own loss alone: seconds, not minutes, on a GPU.", name="--quick"
    ),
]
PreferOption = Annotated[
    Prefer | None,
    _option(
        CHOICES,
        "WHAT",
        "speed: the fastest. memory: the smallest peak within the tolerance of it.",
        _default("prefer"),
    ),
]
MemoryLimitGiB = Annotated[
    float | None,
    _option(
        CHOICES,
        "GIB",
        "Explore as if a device had only so much memory.",
        _default("memory_limit_gib", "all of it"),
        "--memory-limit-gib",
    ),
]
Headroom = Annotated[
    float | None,
    _option(
        CHOICES,
        "SHARE",
        "Leave this share of the memory free, beyond the usual margin (0 to 0.9).",
        _default("headroom"),
    ),
]
Set = Annotated[
    list[str] | None,
    _option(
        CHOICES,
        "K=V",
        "Set any field of a request, such as batching=packed; may be repeated. What is explored is restricted by "
        f"{', '.join(DimensionsAsked.model_fields)}.",
        name="--set",
    ),
]
MaxSeconds = Annotated[
    float | None,
    _option(SEARCH, "SECONDS", "Stop when trials have taken so long together.", _default("max_seconds")),
]
MaxTrials = Annotated[int | None, _option(SEARCH, "N", "Stop after so many trials.", _default("max_trials"))]
ConfidenceTarget = Annotated[
    int | None,
    _option(SEARCH, "N", "Stop when the confidence reaches this (1 to 99).", _default("confidence_target")),
]
Seed = Annotated[int | None, _option(SEARCH, "N", "Seed for everything that is random.", _default("seed"))]
Fresh = Annotated[bool, _option(SEARCH, FLAG, "Measure again what is stored already.", name="--fresh")]
Label = Annotated[
    list[str] | None,
    _option(OUTPUT, "K=V", "Find the exploration by this later; may be repeated.", name="--label"),
]

FIELDS = {
    "seq_length": "model.seq_length",
    "max_seconds": "budget.max_seconds",
    "max_trials": "budget.max_trials",
    "confidence_target": "budget.confidence_target",
    "optim": "training.optimizer.name",
}  # options whose field is not at the top of a request


def collect_fields(
    micro_batch_size: MicroBatchSize = None,
    batch_size: BatchSize = None,
    num_devices: NumDevices = None,
    seq_length: SeqLength = None,
    lengths: LengthsOption = None,
    batching: BatchingOption = None,
    memory_limit_gib: MemoryLimitGiB = None,
    headroom: Headroom = None,
    prefer: PreferOption = None,
    mode: ModeOption = None,
    execution: ExecutionOption = None,
    quick: Quick = False,
    optim: OptimizerOption = None,
    quantization: QuantizationOption = None,
    trainer: TrainerOption = None,
    max_seconds: MaxSeconds = None,
    max_trials: MaxTrials = None,
    confidence_target: ConfidenceTarget = None,
    seed: Seed = None,
    labels: Label = None,
    fresh: Fresh = False,
    assignments: Set = None,
) -> dict[str, Any]:
    """Return the fields of a request that these options stand for. The fields of `--set` replace the others."""
    given = {
        "micro_batch_size": parse_micro_batch_size(micro_batch_size),
        "batch_size": batch_size,
        "num_devices": num_devices,
        "seq_length": seq_length,
        "lengths": None if lengths is None else read_lengths(lengths),
        "batching": batching,
        "memory_limit_gib": memory_limit_gib,
        "headroom": headroom,
        "prefer": prefer,
        "mode": mode,
        "execution": execution,
        "quick": quick or None,
        "optim": optim,
        "quantization": quantization,
        "trainer": trainer,
        "max_seconds": max_seconds,
        "max_trials": max_trials,
        "confidence_target": confidence_target,
        "seed": seed,
        "labels": parse_labels(labels),
        "fresh": fresh or None,
    }
    return {name: value for name, value in given.items() if value is not None} | parse_fields(assignments)


def takes_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `fields` of a command by the parameters of `collect_fields`, and pass its result."""
    collected = inspect.signature(collect_fields, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)
    parameters = [
        inner.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for outer in signature.parameters.values()
        for inner in (collected.values() if outer.name == "fields" else [outer])
    ]

    @functools.wraps(command)
    def with_fields(**arguments: Any) -> None:
        own = {name: arguments.pop(name) for name in signature.parameters if name != "fields"}
        command(**own, fields=collect_fields(**arguments))

    with_fields.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    with_fields.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_fields


def read_request(config: Path, fields: dict[str, Any], **others: Any) -> ExplorationRequest:
    """Return the request in the file, with `fields`, and those of `others` that are not None, in place of its own.

    Raises FormatError if the request is wrong, and CommandError if the file cannot be read.
    """
    return build_request(config, read_document(config), fields, **others)


def build_request(
    config: Path,
    document: Any,
    fields: dict[str, Any],
    *,
    model: Path | None = None,
    launch: Path | None = None,
    **others: Any,
) -> ExplorationRequest:
    """Return the request of a `document`, with `fields` in place of its own; a model without a name has the file's.

    A value of `fields` may be None; `others` that are None are left out. `model` is the config.json of a base model
    that a trainer's own file names and that is not on this disk; `launch` configures `accelerate launch`.
    """
    document = with_model(document, fields.get("trainer"), model, config.parent, launch)
    given: dict[str, Any] = {name: value for name, value in others.items() if value is not None}
    given |= {FIELDS.get(key, key): value for key, value in fields.items()}
    return parse_request(document, overrides=given, name=None if str(config) == "-" else config.absolute().stem)


def split_target(target: str | None) -> tuple[str | None, str | None]:
    """Return the target that `--target` stands for, and its file with the name if it is in a file."""
    path, separator, name = (target or "").rpartition(":")
    if target is None or not (separator or target.endswith(".py")):
        return target, None
    file = Path(path).expanduser().absolute()
    if not name.isidentifier() or file.suffix != ".py":
        raise CommandError(ExitCode.USAGE, f"--target {target!r} names no class: write it as train.py:Target")
    if not file.is_file():
        raise CommandError(ExitCode.USAGE, f"--target: there is no file {path}")
    reference = f"{file}:{name}"
    return name_local_target(reference), reference


def device_kind(device: str | None) -> Literal["cpu", "cuda"] | None:
    """Return the device kind that a job must name so that a worker on `device` takes it."""
    if device is None:
        return None
    kind = device.replace(",", ":").partition(":")[0]
    if kind == "cpu":
        return "cpu"
    if kind == "cuda":
        return "cuda"
    if kind == "replay":  # a recorded table has the kind of the device that it was recorded on
        return None
    raise CommandError(ExitCode.USAGE, f"--device {device!r} is none of cpu, cuda:0, cuda:0-3 and replay:TABLE")


def parse_micro_batch_size(text: str | None) -> Any:
    """Return the field of a request that `--micro-batch-size` stands for."""
    if text is None or text in {"explore", "auto"}:
        return text
    if "," in text and all(part.strip().isdecimal() for part in text.split(",")):
        return [int(part) for part in text.split(",")]
    low, dash, high = text.partition("-")
    if low.isdecimal() and not dash:
        return int(low)
    if low.isdecimal() and high.isdecimal():
        return {"explore": {"min": int(low), "max": int(high)}}
    raise CommandError(
        ExitCode.USAGE,
        f"--micro-batch-size {text!r} is neither explore, auto, MIN-MAX, a number, nor a list such as 2,4,8",
    )


def parse_fields(assignments: list[str] | None) -> dict[str, Any]:
    """Return the fields that `--set` names, their values read as YAML.

    Raises CommandError for text without "=" or without a value, and FormatError for a value that is no YAML.
    """
    try:
        return dict(map(read_field, assignments or ()))
    except FormatError:
        raise
    except ValueError as error:
        hint = "FIELD=null stands for no value, FIELD='\"\"' for an empty text"
        raise CommandError(ExitCode.USAGE, f"--set {error}", hint) from None
