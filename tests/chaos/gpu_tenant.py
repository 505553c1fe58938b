"""Another process on a GPU: `python -m tests.chaos.gpu_tenant cuda:0` takes 6 GiB, says so, and keeps them."""

from __future__ import annotations

import sys
import time

HELD_BYTES = 6 << 30
HOLDS = b"holds\n"


def main() -> None:
    """Hold memory until somebody ends this process."""
    import torch

    held = torch.ones(HELD_BYTES, dtype=torch.uint8, device=sys.argv[1])
    torch.cuda.synchronize(held.device)
    sys.stdout.write(HOLDS.decode())
    sys.stdout.flush()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
