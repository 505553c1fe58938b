"""The default place of the database. The module imports nothing slow, because every command needs it."""

from __future__ import annotations

from pathlib import Path


def default_database_url(data_home: str = "") -> str:
    """Return the URL of this user's SQLite database, which does not depend on the working directory.

    `data_home` is XDG_DATA_HOME (XDG base directory specification); it is used if it is an absolute path.
    """
    folder = Path(data_home) if data_home.startswith("/") else Path.home() / ".local" / "share"
    return f"sqlite:///{folder / 'bexp' / 'bexp.db'}"
