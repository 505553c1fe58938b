"""A trainer's own file with the settings of an export in it."""

from __future__ import annotations

from pathlib import Path

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.cli.yaml_lines import UnchangeableError, change_values, read_values
from bexp.explorer.formats.trainers.reader import FILES, setting_of


def exported_into(path: Path, export_format: str, exported: str) -> tuple[str, list[str]]:
    """Return the text of the file with the values of an `exported` YAML or JSON, and the comments of the export.

    Comments, order and spelling of the file stay. Where it sets the same by another key, such as an older name, that
    key becomes null.

    Raises CommandError if the file cannot be read, or not be changed value by value.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:  # its ends of lines stay
            text = file.read()
        old, new = read_values(text), read_values(exported)
        told = {setting_of(export_format, key) for key in new} - {None}
        changes = {key: value for key, value in new.items() if key not in old or old[key] != value}
        changes |= {
            key: None
            for key, value in old.items()
            if value is not None and key not in new and setting_of(export_format, key) in told
        }
        changed = change_values(text, changes) if changes else text
    except OSError as error:
        raise CommandError(ExitCode.USAGE, f"{error.strerror}: {path}") from None
    except (UnchangeableError, UnicodeDecodeError) as error:
        raise CommandError(ExitCode.USAGE, f"--into {path}: {error}") from None
    return changed, [line[2:] for line in exported.splitlines() if line.startswith("# ")]


def check_into(export_format: str | None) -> None:
    """Raise CommandError unless an export's settings are keys of a trainer's own YAML."""
    able = [name for name, file in FILES.items() if not file.is_nested]
    if export_format not in able:
        raise CommandError(ExitCode.USAGE, f"--into needs --format {' or '.join(able)}")
