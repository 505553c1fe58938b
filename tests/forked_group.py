"""`python -m bexp.workers.profiler.distributed`, whose ranks are forked and so have torch when they begin."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from bexp.workers.profiler.distributed.__main__ import main
from tests.chaos import fork_server


class RankServer(fork_server.ForkServer):
    """A copy of this process that forks ranks, and ends with this process. There must be no threads yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            os.dup2(theirs.fileno(), sys.stdin.fileno())
            theirs.close()
            del sys.argv[1:]
            fork_server.main()
            os._exit(0)
        theirs.close()

    @property
    def pid(self) -> int:
        return self._pid

    def start_rank(self, command: Sequence[str], _: Mapping[str, str]) -> object:
        """Start the rank that torch's launcher would start with this command line."""
        at = command.index("-m") + 1
        arguments = list(command[at + 1 :])
        arguments[arguments.index("--parent") + 1] = str(self.pid)
        return self.start(command[at], *arguments, output=sys.stdout.fileno())


if __name__ == "__main__":
    SubprocessHandler._popen = RankServer().start_rank  # type: ignore[assignment]  # a double
    raise SystemExit(main())
