"""The API as a child of a command: `python -m api.embedded_api FD`, FD being a listening socket that it inherits.

The database comes from the environment. It ends on SIGTERM, and when its stdin, a pipe from the command, closes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

from api.serve import serve_on
from api.settings import ServiceSettings, read_environment
from storage.database import open_database
from storage.schema import upgrade


def main(listener: socket.socket) -> None:
    """Serve on `listener` until told to end."""
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    database_url = read_environment().database_url
    _upgrade(database_url)
    serve_on(listener, ServiceSettings(database_url))


def _upgrade(database_url: str) -> None:
    database = open_database(database_url)
    try:
        upgrade(database)
    finally:
        database.dispose()


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 64):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
