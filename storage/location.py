"""Where the database is when nobody says otherwise. Imports nothing that takes long: every command asks."""

from __future__ import annotations

from pathlib import Path


def default_database_url(data_home: str = "") -> str:
    """The SQLite database of this user, wherever a command is started from.

    `data_home` is XDG_DATA_HOME (XDG base directory specification): used if it is an absolute path.
    """
    folder = Path(data_home) if data_home.startswith("/") else Path.home() / ".local" / "share"
    return f"sqlite:///{folder / 'bexp' / 'bexp.db'}"
