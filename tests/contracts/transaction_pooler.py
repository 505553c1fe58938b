"""A pooler that shares connections to PostgreSQL by transaction, as PgBouncer does with `pool_mode = transaction`.

A client has a server's connection from its first message until the server is outside of a transaction again. The
next transaction gets another connection. So what belongs to a session gets lost, or comes to somebody else.
"""

from __future__ import annotations

import random
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import sqlalchemy as sa

PORT = 6432
TERMINATE, QUERY, SYNC, READY = b"X", b"Q", b"S", b"Z"
IDLE = b"I"


@contextmanager
def pooled(url: str, folder: Path, *, num_servers: int = 3) -> Iterator[str]:
    """Serve the database of `url`, which names the folder of a socket, until the context ends; yield the pooled URL."""
    direct = sa.make_url(url)
    server_path = f"{direct.query['host']}/.s.PGSQL.{direct.port or 5432}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / f".s.PGSQL.{PORT}"))
    listener.listen()
    pooler = _Pooler(server_path, num_servers)
    threading.Thread(target=pooler.accept, args=(listener,), daemon=True).start()
    try:
        yield direct.set(port=PORT, query={"host": str(folder)}).render_as_string(hide_password=False)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        pooler.close()


class _Pooler:
    def __init__(self, server_path: str, num_servers: int) -> None:
        self._server_path = server_path
        self._num_servers = num_servers
        self._free: list[socket.socket] = []
        self._freed = threading.Condition()
        self._random = random.Random(0)  # in turns, some sequences of statements would be lucky
        self._greeting = b""
        self._started = threading.Lock()
        self._sockets: list[socket.socket] = []

    def accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                self._sockets.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, EOFError):
            length = _receive(client, 4)
            startup = length + _receive(client, int.from_bytes(length) - 4)
            with self._started:
                if not self._greeting:
                    self._connect(startup)
            client.sendall(self._greeting)
            server = None
            while (first := _read_message(client))[:1] != TERMINATE:
                server = self._take(server)
                while select.select([server], [], [], 0)[0]:
                    _read_message(server)  # a notification that came between two transactions is for nobody
                try:
                    _relay(client, server, first)
                finally:
                    with self._freed:
                        self._free.append(server)
                        self._freed.notify()

    def _take(self, last: socket.socket | None) -> socket.socket:
        """Return a free connection, another than the last one if there is one."""
        with self._freed:
            self._freed.wait_for(lambda: self._free)
            others = [one for one in self._free if one is not last]
            taken = self._random.choice(others or self._free)
            self._free.remove(taken)
            return taken

    def _connect(self, startup: bytes) -> None:
        for _ in range(self._num_servers):
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server_path)
            self._sockets.append(server)
            server.sendall(startup)
            greeting = b""
            while (message := _read_message(server))[:1] != READY:
                greeting += message
            self._greeting = greeting + message
            self._free.append(server)


def _relay(client: socket.socket, server: socket.socket, message: bytes) -> None:
    """Pass messages on until the server has answered all of them and is in no transaction."""
    num_open, status = 0, IDLE
    while True:
        server.sendall(message)
        num_open += message[:1] in (QUERY, SYNC)
        while num_open or status != IDLE:
            readable, _, _ = select.select([client, server], [], [])
            if client in readable:
                message = _read_message(client)
                break
            answer = _read_message(server)
            client.sendall(answer)
            if answer[:1] == READY:
                num_open, status = num_open - 1, answer[5:6]
        else:
            return
        if message[:1] == TERMINATE:
            raise EOFError


def _read_message(source: socket.socket) -> bytes:
    head = _receive(source, 5)
    return head + _receive(source, int.from_bytes(head[1:]) - 4)


def _receive(source: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part = source.recv(num_bytes - len(received))
        if not part:
            raise EOFError
        received += part
    return received
