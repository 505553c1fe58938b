"""The trainers and the formats by name, all of them from the list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from bexp.explorer.trainers import all_trainers
from bexp.explorer.trainers.document import Render
from bexp.explorer.trainers.keys import ReadSideFile, TrainerFile
from bexp.explorer.trainers.trainer import Trainer


class UnknownFormatError(ValueError):
    """No export has this name; the message lists the existing ones."""


class TrainerName(StrEnum):
    """The trainer that runs an answer. `bexp` is transformers' Trainer, or any loop, with `bexp.apply`."""

    _ignore_ = ["members", "trainer"]  # noqa: RUF012 - as the enum module defines it
    members = vars()
    for trainer in all_trainers.ALL_TRAINERS:
        members[trainer.name.upper()] = trainer.name


@dataclass(frozen=True, slots=True)
class Format:
    """A format: the trainer that reads it, and the function that writes it."""

    trainer: Trainer
    render: Render


TRAINERS: Mapping[str, Trainer] = {trainer.name: trainer for trainer in all_trainers.ALL_TRAINERS}
DEFAULT_TRAINER = all_trainers.ALL_TRAINERS[0]
"""The trainer of an answer if its request names none."""
FORMATS: Mapping[str, Format] = {
    name: Format(trainer, render) for trainer in TRAINERS.values() for name, render in trainer.formats.items()
}
FILES: Mapping[str, TrainerFile] = {
    name: trainer.file for name, trainer in TRAINERS.items() if trainer.file is not None
}
"""The tables of the files that people train with, by the names of their trainers."""
SIDE_FILES: Mapping[str, ReadSideFile] = dict(
    trainer.side_file for trainer in TRAINERS.values() if trainer.side_file is not None
)
"""The readers of the files of the training side that are given with a model, by their fields of a document."""


def find_format(name: str) -> Format:
    """Return the format called `name`. Raises UnknownFormatError with the known names."""
    if name not in FORMATS:
        raise UnknownFormatError(f"there is no format of this name; the formats are {', '.join(FORMATS)}")
    return FORMATS[name]
