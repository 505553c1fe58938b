"""Options that `explore` and `submit` share. They override the configuration file."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bexp.api.cli.arguments import parse_labels
from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.cli.files import read_document, read_lengths, with_model
from bexp.api.cli.option_values import parse_fields, parse_micro_batch_size
from bexp.explorer.formats.request import parse_request
from bexp.explorer.spec.lengths import Batching
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.target import name_local_target
from bexp.explorer.spec.trainer import TrainerName


class Mode(StrEnum):
    """Training, or the forward pass alone."""

    TRAIN = "train"
    EVAL = "eval"


class ExecutionMode(StrEnum):
    """How torch runs the model."""

    EAGER = "eager"
    COMPILE = "compile"
    GRAPH = "graph"
    COMPILE_GRAPH = "compile+graph"
    EXPLORE = "explore"


class Prefer(StrEnum):
    """What decides among candidates that are about as fast."""

    SPEED = "speed"
    MEMORY = "memory"


def _default(field: str, otherwise: str | None = None) -> str:
    """Return what the help says of an option that replaces a field of the configuration."""
    fields = {**ExplorationRequest.model_fields["budget"].default.model_dump(), **_plain_defaults()}
    return f"of CONFIG, else {fields[field] if otherwise is None else otherwise}"


def _plain_defaults() -> dict[str, Any]:
    return {name: field.default for name, field in ExplorationRequest.model_fields.items()}


Config = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="A request (YAML or JSON), a Hugging Face config.json or its folder, a Cerebras or NeMo YAML, "
        "Megatron's flags; the YAML that Axolotl, LLaMA-Factory, TRL or torchtune trains with; - reads stdin.",
    ),
]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="PATH",
        help="The config.json of the base model, or its folder, for a YAML of a trainer that names a model on the hub.",
        show_default="as the YAML says",
    ),
]
MicroBatchSize = Annotated[
    str | None,
    typer.Option(
        metavar="explore|auto|MIN-MAX|N|N,N",
        help="Micro-batch sizes to consider; MIN-MAX limits the range, 2,4,8 names them.",
        show_default="of CONFIG, else auto with a batch size, and explore without",
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="The effective batch size, over all devices.", show_default=_default("batch_size", "none")),
]
NumDevices = Annotated[
    int | None, typer.Option(help="The number of devices that share the batch.", show_default=_default("num_devices"))
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|lognormal(MEAN,SIGMA)",
        help="How long texts are in tokens: a file with one length a line or a JSON histogram, or a distribution.",
        show_default="of CONFIG, else every sequence is full",
    ),
]
BatchingOption = Annotated[
    Batching | None,
    typer.Option(
        help="What becomes of such texts: padded to the longest, grouped by length before that, or packed.",
        show_default="of CONFIG, else padded",
    ),
]
SeqLength = Annotated[int | None, typer.Option(help="The number of tokens in a sequence.", show_default="of CONFIG")]
MemoryLimitGiB = Annotated[
    float | None,
    typer.Option(
        "--memory-limit-gib",
        help="Explore as if the device had only so many GiB of memory.",
        show_default=_default("memory_limit_gib", "all of it"),
    ),
]
Headroom = Annotated[
    float | None,
    typer.Option(
        help="Leave this share of the memory free, beyond the usual margin (0 to 0.9).",
        show_default=_default("headroom"),
    ),
]
PreferOption = Annotated[
    Prefer | None,
    typer.Option(
        help="Recommend the fastest, or the smallest peak within the tolerance of it.", show_default=_default("prefer")
    ),
]
ModeOption = Annotated[
    Mode | None, typer.Option(help="Train, or evaluate with forward passes only.", show_default=_default("mode"))
]
ExecutionOption = Annotated[
    ExecutionMode | None,
    typer.Option(
        metavar="eager|compile|graph|compile+graph|explore",
        help="Run eagerly, with layers compiled by torch.compile, as CUDA graphs (one GPU, training), or find out "
        "which is the fastest.",
        show_default=_default("execution", "all that a GPU and the trainer can have, and eager on a CPU"),
    ),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="Explore eager execution and the library's own loss alone: seconds in place of a minute or two on a GPU.",
    ),
]
OptimizerOption = Annotated[
    str | None,
    typer.Option(
        "--optim",
        metavar="NAME",
        help="The optimizer, by its name in transformers' TrainingArguments: adamw_torch_fused, adamw_bnb_8bit, "
        "adafactor, lion_8bit, adamw_torch_4bit, ...",
        show_default="of CONFIG, else adamw_torch_fused",
    ),
]
QuantizationOption = Annotated[
    str | None,
    typer.Option(
        metavar="bnb_4bit|bnb_8bit|none",
        help="Weights of a config.json in four or eight bits, as transformers loads them with bitsandbytes; training "
        "needs training.lora.",
        show_default="as the config.json says",
    ),
]
TrainerOption = Annotated[
    TrainerName | None,
    typer.Option(
        help="Who will run the answer: only what this trainer can be told is explored. bexp is any loop with "
        "`bexp.apply`.",
        show_default="everything is explored, for `bexp.apply`; cerebras for a Cerebras YAML",
    ),
]
_TARGET = "of CONFIG, else transformers for a config.json of Hugging Face, and bexp for a model of shapes"
TargetOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The code whose training step is measured: bexp, transformers, or a registered one.",
        show_default=_TARGET,
    ),
]
LocalTargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="The code whose training step is measured: bexp, transformers, a registered one, or a class of your own "
        "as FILE.py:NAME.",
        show_default=_TARGET,
    ),
]
MaxSeconds = Annotated[
    float | None,
    typer.Option(
        help="Stop when trials have taken this time, added up over all.", show_default=_default("max_seconds")
    ),
]
MaxTrials = Annotated[
    int | None, typer.Option(help="Stop after this many trials.", show_default=_default("max_trials"))
]
ConfidenceTarget = Annotated[
    int | None,
    typer.Option(help="Stop when the confidence reaches this (1 to 99).", show_default=_default("confidence_target")),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Set any field of the request, such as batching=packed; may be repeated."
    ),
]
Label = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="Find the exploration by this later; may be repeated."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what is stored already.")]
Seed = Annotated[int | None, typer.Option(help="Seed for everything that is random.", show_default=_default("seed"))]

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
    """Return the fields of a request that these options stand for. What `--set` says replaces the others."""
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
    """Replace the parameter `fields` of a command by the parameters of `collect_fields`, and pass what that returns."""
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
    """Return the request in the file, with the given `fields`, and those of `others` that are not None, in their place.

    Raises FormatError if the request is wrong, and CommandError if the file cannot be read.
    """
    return build_request(config, read_document(config), fields, **others)


def build_request(
    config: Path, document: Any, fields: dict[str, Any], *, model: Path | None = None, **others: Any
) -> ExplorationRequest:
    """Return the request of a `document`, with `fields` in place of its own; a model without a name has the file's.

    What `fields` name may be null; `others` that are None are left out. `model` is the base model's config.json, where
    a trainer's own file names one that is not on this disk.
    """
    document = with_model(document, fields.get("trainer"), model)
    given: dict[str, Any] = {name: value for name, value in others.items() if value is not None}
    given |= {FIELDS.get(key, key): value for key, value in fields.items()}
    return parse_request(document, overrides=given, name=None if str(config) == "-" else config.absolute().stem)


def split_target(target: str | None) -> tuple[str | None, str | None]:
    """Return the field of a request that `--target` stands for, and the file with its name if it means one."""
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
