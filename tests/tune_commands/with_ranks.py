"""Trains a tiny network in several processes, by torchrun: transformers' Trainer, accelerate's loop or a plain one.

One of the processes may be slower, fuller, or break from a size on.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def _run_out_of_memory() -> None:
    raise MemoryError("out of memory")


FAULTS: dict[str, Callable[[], object]] = {
    "memory": _run_out_of_memory,
    "crash": lambda: sys.exit("the data is corrupt"),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(3600),
}


class Numbers(Dataset[dict[str, Tensor]]):
    """Samples of one size."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"x": torch.full((64,), place / 512)}


class Net(nn.Module):
    """A network whose process may be another one's burden."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.options = options
        self.sizes: list[int] = []
        self.held: list[Tensor] = []
        self.is_other = os.environ["RANK"] == str(options.rank)

    def forward(self, x: Tensor, **_: Any) -> dict[str, Tensor]:
        self.sizes.append(len(x))
        if self.is_other:
            time.sleep(self.options.slower)
            self.held = self.held or [torch.ones(self.options.fuller, 1 << 20, dtype=torch.uint8)]
            if len(x) >= self.options.fail_from:
                FAULTS[self.options.fault]()
        return {"loss": (self.net(x) - x).square().mean()}


def main() -> None:
    """Train, and write the sizes of all micro-batches of this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", choices=["trainer", "accelerate", "plain"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--slower", type=float, default=0.0, help="seconds of a micro-batch")
    parser.add_argument("--fuller", type=int, default=0, help="MiB")
    parser.add_argument("--fault", choices=FAULTS, default="memory")
    parser.add_argument("--fail-from", type=int, default=1 << 30)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    net = Net(options)
    {"trainer": _with_trainer, "accelerate": _with_accelerate, "plain": _plainly}[options.loop](net, options)
    options.output.mkdir(exist_ok=True)
    (options.output / f"sizes-{dist.get_rank()}").write_text(" ".join(map(str, net.sizes)))
    dist.destroy_process_group()


def _with_trainer(net: Net, options: argparse.Namespace) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(options.output / "trainer"),
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        max_steps=options.steps,
        save_strategy="no",
        report_to=[],
        ddp_backend="gloo",
    )
    Trainer(model=net, args=arguments, train_dataset=Numbers()).train()


def _with_accelerate(net: Net, options: argparse.Namespace) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate)
    loader = DataLoader(Numbers(), batch_size=options.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
    step = 0
    while step < options.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if step == options.steps:
                break


def _plainly(net: Net, options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters())
    data = Numbers()
    loader = DataLoader(data, batch_size=options.batch, sampler=DistributedSampler(data))
    batches = iter(loader)
    for _ in range(options.steps):
        for _ in range(options.accumulate):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
