"""Trains a tiny model with Lightning's Trainer, and writes, logs and evaluates all that it can."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset

from tests.tune_commands.with_a_loader import Texts, pad

BEST, SLOWER = 8, 4
"""A sample takes longer in micro-batches above this size, by so much."""


class Batches(IterableDataset[dict[str, Tensor]]):
    """A stream that makes its own batches."""

    def __init__(self, texts: Any, size: int) -> None:
        self._texts = texts
        self._size = size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for first in range(0, len(self._texts), self._size):
            yield pad([self._texts[place] for place in range(first, min(first + self._size, len(self._texts)))])


def main() -> None:
    """Train, validate and save, and write the least seconds of a sample, because the machine has other work."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", default="lightning.pytorch")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--texts", action="store_true")
    parser.add_argument("--data", choices=["fit", "module", "datamodule", "batch_sampler", "stream"], default="fit")
    parser.add_argument("--by_hand", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    package = importlib.import_module(options.package)
    model = _define(package)(options)
    data = _define_data(package)(options)
    trainer = package.Trainer(
        accelerator="cpu",
        devices=options.processes,
        max_steps=options.max_steps,
        accumulate_grad_batches=1 if options.by_hand else options.accumulate,
        default_root_dir=options.output / "root",
        logger=package.loggers.CSVLogger(options.output / "logs"),
        callbacks=[
            package.callbacks.ModelCheckpoint(options.output / "checkpoints", every_n_train_steps=1, save_top_k=-1),
            package.callbacks.LearningRateMonitor(),
        ],
        val_check_interval=4,
        log_every_n_steps=1,
        profiler="simple",
    )
    loaders = {"val_dataloaders": data.val_dataloader()}
    if options.data in ("datamodule", "batch_sampler"):
        trainer.fit(model, data)
    elif options.data == "module":
        model.train_dataloader = data.train_dataloader
        trainer.fit(model, **loaders)
    else:
        trainer.fit(model, data.train_dataloader(), **loaders)
    trainer.save_checkpoint(options.output / "last.ckpt")
    trainer.validate(model, data.val_dataloader())
    seconds = min(later - earlier for earlier, later in itertools.pairwise(model.begun)) / options.batch
    (options.output / "sizes.json").write_text(json.dumps(model.sizes))
    (options.output / "finished.json").write_text(json.dumps({"seconds": seconds}))


def _define(package: Any) -> Any:
    class Model(package.LightningModule):
        """Takes longer for a sample in small micro-batches, and in large ones."""

        def __init__(self, options: Any) -> None:
            super().__init__()
            self.options = options
            self.begun: list[float] = []
            self.sizes: list[int] = []
            self.automatic_optimization = not options.by_hand
            self.net = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))

        def training_step(self, batch: Any, number: int) -> Tensor:
            self.begun.append(time.monotonic())
            tokens: Tensor = batch["input_ids"]
            size = len(tokens)
            self.sizes.append(size)
            time.sleep(0.02 + 0.002 * size * (SLOWER if size > BEST else 1))
            loss = nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())
            self.log("loss", loss, prog_bar=True)
            self.log("rate", self.lr_schedulers().get_last_lr()[0])
            if self.options.by_hand:
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            (self.options.output / "validated").touch()
            self.log("loss_of_validation", 1.0 / (1 + self.global_step))

        def configure_callbacks(self) -> Any:
            return package.callbacks.EarlyStopping("loss_of_validation")

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters())
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Model


def _define_data(package: Any) -> Any:
    class Data(package.LightningDataModule):
        """Texts of one length or of many."""

        def __init__(self, options: Any) -> None:
            super().__init__()
            self.options = options
            self.batch_size = options.batch
            self.texts: Any = Texts(200) if options.texts else [{"input_ids": [7] * 16} for _ in range(64)]

        def train_dataloader(self) -> Any:
            if self.options.data == "stream":
                return DataLoader(Batches(self.texts, self.batch_size), batch_size=None)
            if self.options.data == "batch_sampler":
                batches = BatchSampler(SequentialSampler(self.texts), self.batch_size, drop_last=True)
                return DataLoader(self.texts, batch_sampler=batches, collate_fn=pad)
            return DataLoader(self.texts, batch_size=self.batch_size, shuffle=True, collate_fn=pad)

        def val_dataloader(self) -> Any:
            return DataLoader(Subset(self.texts, range(4)), batch_size=2, collate_fn=pad)

    return Data


if __name__ == "__main__":
    main()
