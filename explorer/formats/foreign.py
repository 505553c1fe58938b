"""Files of training programs that are not read, recognised by their keys and refused in one sentence with a way on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bexp.explorer.model.spelling import shortened

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """A kind of file that is not read."""

    title: str
    """The kind, for a person."""
    is_one: Callable[[Document], bool]
    model: str | None = None
    """The dotted key of the base model, whose config.json can be explored; None: it names no model to look up."""
    length: str | None = None
    """The dotted key of the tokens of a sequence."""
    batch: str | None = None
    """The dotted key of the sequences of an optimizer step, of all devices."""
    command: str = "COMMAND"
    """The command that starts its program."""
    extra: str = ""
    """More of the options of `bexp explore`."""


def _at(document: Document, key: str | None) -> Any:
    """Return the value of a dotted key; None if there is none."""
    value: Any = None if key is None else document
    for part in [] if key is None else key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _has(*keys: str) -> Callable[[Document], bool]:
    """Return whether a document has a value of each of these dotted keys."""
    return lambda document: all(_at(document, key) is not None for key in keys)


FOREIGN = (
    ForeignFile(
        "a recipe of NeMo AutoModel",
        lambda document: (
            str(_at(document, "model._target_")).startswith("nemo_automodel.")
            or _has("recipe", "step_scheduler")(document)
        ),
        model="model.pretrained_model_name_or_path",
        length="packed_sequence.packed_sequence_size",
        batch="step_scheduler.global_batch_size",
    ),
    ForeignFile(
        "a configuration of veRL",
        _has("actor_rollout_ref"),
        model="actor_rollout_ref.model.path",
        batch="actor_rollout_ref.actor.ppo_mini_batch_size",
    ),
    ForeignFile(
        "the arguments of ms-swift",
        lambda document: (
            isinstance(document.get("model"), str)
            and not document.keys().isdisjoint({"train_type", "tuner_type", "sft_type", "swift_version"})
        ),
        model="model",
        length="max_length",
        command="swift sft FILE",
    ),
    ForeignFile(
        "a configuration of torchtitan",
        lambda document: (
            isinstance(_at(document, "model.flavor"), str) or _has("job", "training.local_batch_size")(document)
        ),
        length="training.seq_len",
        batch="training.global_batch_size",
        extra=" --trainer torchtitan",
    ),
    ForeignFile(
        "a configuration of LitGPT",
        _has("checkpoint_dir", "train.micro_batch_size"),
        model="checkpoint_dir",
        length="train.max_seq_length",
        batch="train.global_batch_size",
    ),
    ForeignFile(
        "a configuration of Lightning's command line",
        _has("model.class_path"),
        command="python main.py fit --config FILE",
    ),
    ForeignFile(
        "a configuration of accelerate launch (devices without a model)",
        _has("distributed_type"),
        command="accelerate launch --config_file FILE train.py",
        extra=" --accelerate FILE",
    ),
    ForeignFile(
        "a configuration of DeepSpeed (it names no model)",
        lambda document: (
            not document.keys().isdisjoint({"train_micro_batch_size_per_gpu", "zero_optimization", "train_batch_size"})
            and "model" not in document
            and "hf_config" not in document
        ),
        batch="train_batch_size",
        command="deepspeed train.py",
    ),
)


def why_foreign(document: Document) -> str | None:
    """Return what a file of another program is, and what to give instead; None for any other document."""
    file = next((each for each in FOREIGN if each.is_one(document)), None)
    if file is None:
        return None
    model = _at(document, file.model)
    whose = f"of {shortened(model)} " if isinstance(model, str) else "of its model "
    options = [
        f"--{name} {value if isinstance(value, int) else 'N'}"
        for name, value in (("seq-length", _at(document, file.length)), ("batch-size", _at(document, file.batch)))
    ]
    return (
        f"is {file.title}, which is not read: `bexp explore config.json {' '.join(options)}{file.extra}` with the "
        f"config.json {whose}explores its sizes, and `bexp tune -- {file.command}` measures the program itself"
    )
