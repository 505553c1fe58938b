"""Two ranks on the CPU that compare context-parallel layouts, and go on with what they have found.

    python -m tests.benchmarks.context_parallel_ranks FOLDER

writes there what is found after each of the two runs.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from benchmarks.context_parallel import main
from tests.forked_ranks import fork_ranks

NUM_RANKS = 2
RUNS = {
    "first": ("--seq-lengths", "64", "--rounds", "2"),
    "continued": ("--seq-lengths", "128", "64", "--rounds", "1"),
}


def run(arguments: list[str], port: int, rank: int) -> None:
    """Be a rank as torchrun starts it."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the launcher's: nobody else can take its port
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    assert main(arguments) == 0


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name, options in RUNS.items():
        arguments = ["--device", "cpu", "--out", str(folder / "found.json"), *options]
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if fork_ranks(partial(run, arguments, store.port), NUM_RANKS):
            sys.exit(1)
        shutil.copyfile(folder / "found.json", folder / f"{name}.json")
