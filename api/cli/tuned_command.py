"""The settings of a training command, in its arguments or in its YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from bexp.api.cli.yaml_lines import UnchangeableError, change_values, read_values
from bexp.explorer.trainers.keys import Setting
from bexp.explorer.trainers.registry import TRAINERS
from bexp.tune.placeholders import text_of

SIZE, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
"""Fields of TrainingArguments; the other settings have the names of such fields as well."""
_IN_WORDS = {SIZE: "micro-batch", STEPS: "accumulation steps"}
"""The words for these settings in other loops."""
_FIELDS = {
    *_IN_WORDS,
    "output_dir",
    "per_device_eval_batch_size",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "bf16",
    "fp16",
    "optim",
    "gradient_checkpointing",
}
"""A command with a flag of such a name takes all fields of TrainingArguments as flags."""
_FILE = re.compile(r"(?:.*=)?(.+\.(?:ya?ml|json|toml|ini|cfg))")
_SETTINGS = {SIZE: Setting.MICRO_BATCH_SIZE, STEPS: Setting.STEPS, "optim": Setting.OPTIMIZER}
_TRAINERS = {
    re.compile(trainer.file.program): trainer
    for trainer in TRAINERS.values()
    if trainer.file is not None and trainer.file.program is not None
}
"""The programs that start a trainer with a YAML that can be changed."""
YAML_OF = " or ".join(trainer.title for trainer in _TRAINERS.values())
_GIVEN = re.compile(r"(--)?([\w.-]+)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True)
class _Flag:
    """A flag in the arguments at `place`, as spelled. Its value is a part of it, the next argument, or missing."""

    place: int
    name: str
    value: str | None
    is_joined: bool


class TunedCommand:
    """A command whose settings can be read and changed."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        self._names: dict[str, str] = {}
        self._yaml: int | None = None
        for place, (before, argument) in enumerate(pairwise(["", *self.arguments])):
            trainer = next((each for program, each in _TRAINERS.items() if program.fullmatch(argument)), None)
            if trainer is not None and trainer.file is not None and not before.startswith("--"):
                self._names = {field: trainer.file.name_of(setting) for field, setting in _SETTINGS.items()}
                files = (i for i, each in enumerate(self.arguments) if i > place and each.endswith((".yaml", ".yml")))
                self._yaml = next(files, None)

    @property
    def yaml(self) -> Path | None:
        """The YAML of a library that this command reads."""
        return None if self._yaml is None else Path(self.arguments[self._yaml])

    def changes(self, values: Mapping[str, Any], own: Mapping[str, Any], *, takes_flags: bool = True) -> list[str]:
        """Return the changes for these values, a line for each.

        `own` are the command's values for settings that stand nowhere in it, as far as known. With `takes_flags`, such
        a setting may be added as a flag, if the command has another flag of TrainingArguments.
        """
        lines = []
        adds_flags = takes_flags and any(self.has_flag(field) for field in _FIELDS)
        where = " or ".join(["the script", *(["its arguments"] if self._has_other_arguments else []), *self._files])
        for field, value in values.items():
            name, new = self._names.get(field, field), text_of(value)
            flags = list(self._flags(name))
            if flags:
                if flags[-1].value != new:
                    lines.append(f"{flags[-1].name} {flags[-1].value or '(set)'} -> {new}")
            elif self.yaml is not None and self._settings.get(name) is not None:
                if self._settings[name] != value:
                    lines.append(f"{name}: {text_of(self._settings[name])} -> {new} in {self.yaml}")
            elif own.get(field) == value:
                continue
            elif self.yaml is not None:
                lines.append(f"add {name}: {new} to {self.yaml}")
            elif adds_flags:
                lines.append(f"add --{name} {new}")
            else:
                old = f"{own[field]} -> " if own.get(field) is not None else ""
                words = field if takes_flags else _IN_WORDS.get(field, field)
                lines.append(f"{words} {old}{new} in {where}")
        return lines

    def has_flag(self, field: str) -> bool:
        """Return whether a setting stands in the arguments."""
        return any(self._flags(self._names.get(field, field)))

    def with_flags(self, values: Mapping[str, Any], written: Path | None = None) -> list[str]:
        """Return the arguments with these values in the existing flags, and `written` in place of the YAML."""
        arguments = [*self.arguments]
        for field, value in values.items():
            for flag in self._flags(self._names.get(field, field)):
                if flag.is_joined or flag.value is None:
                    arguments[flag.place] = f"{flag.name}={text_of(value)}"
                else:
                    arguments[flag.place + 1] = text_of(value)
        if written is not None and self._yaml is not None:
            arguments[self._yaml] = str(written)
        return arguments

    def changed_yaml(self, values: Mapping[str, Any]) -> str:
        """Return the text of the YAML with these values.

        Raises UnchangeableError if there is none, or if it cannot be changed.
        """
        if self.yaml is None:
            raise UnchangeableError(f"the command reads no YAML of {YAML_OF}")
        with self.yaml.open(newline="") as file:  # its ends of lines stay
            return change_values(file.read(), {self._names.get(field, field): value for field, value in values.items()})

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The values of the YAML; empty if it cannot be read, such as one on another machine."""
        try:
            return {} if self.yaml is None else read_values(self.yaml.read_text())
        except (OSError, UnchangeableError):
            return {}

    @property
    def _files(self) -> list[str]:
        """The files of settings in the arguments of the script, which may read its sizes there."""
        return [match[1] for each in self.arguments[self._begin :] if (match := _FILE.fullmatch(each))]

    @property
    def _has_other_arguments(self) -> bool:
        """Whether the script has arguments that are no files, such as a flag of its own for a size."""
        module = self.arguments[self._begin : self._begin + 1] == ["-m"]
        own = self.arguments[self._begin + (2 if module else 1) :]
        return any(_FILE.fullmatch(each) is None for each in own)

    def _flags(self, name: str) -> Iterator[_Flag]:
        """Yield each `--name value`, `--name=value` or `name=value` after the script; others belong to its launcher."""
        for place in range(self._begin, len(self.arguments)):
            match = _GIVEN.fullmatch(self.arguments[place])
            if match is None or match[2].replace("-", "_") != name:
                continue
            if match[3] is not None:
                yield _Flag(place, f"{match[1] or ''}{match[2]}", match[3], is_joined=True)
            elif match[1]:
                following = self.arguments[place + 1 : place + 2]
                has_value = bool(following) and not following[0].startswith("--")
                yield _Flag(place, f"--{match[2]}", following[0] if has_value else None, is_joined=False)

    @cached_property
    def _begin(self) -> int:
        """The place of the script or the module, which is no flag itself; 0 without one."""
        scripts = [place for place, each in enumerate(self.arguments) if each.endswith(".py")]
        modules = [place for place, each in enumerate(self.arguments) if each == "-m"]
        return scripts[0] if scripts else modules[-1] if modules else 0
