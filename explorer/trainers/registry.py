"""The trainers and the formats by name, all of them from the list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from bexp.explorer.trainers import all_trainers
from bexp.explorer.trainers.document import Render
from bexp.explorer.trainers.keys import ReadBeside, TrainerFile
from bexp.explorer.trainers.trainer import Trainer


class UnknownFormatError(ValueError):
    """No export has this name; the message lists those that exist."""


class TrainerName(StrEnum):
    """Who runs an answer. `bexp` is transformers' Trainer, or any loop, with `bexp.apply`."""

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
"""Who runs an answer for which no request names a trainer."""
FORMATS: Mapping[str, Format] = {
    name: Format(trainer, render) for trainer in TRAINERS.values() for name, render in trainer.formats.items()
}
FILES: Mapping[str, TrainerFile] = {
    name: trainer.file for name, trainer in TRAINERS.items() if trainer.file is not None
}
"""How the files that people train with are read, by the names of their trainers."""
SIDE_FILES: Mapping[str, ReadBeside] = dict(
    trainer.side_file for trainer in TRAINERS.values() if trainer.side_file is not None
)
"""What reads the files of the training side that stand beside a model, by their fields of a document."""


def find_format(name: str) -> Format:
    """Return the format called `name`. Raises UnknownFormatError with the names that there are."""
    if name not in FORMATS:
        raise UnknownFormatError(f"there is no format of this name; the formats are {', '.join(FORMATS)}")
    return FORMATS[name]
