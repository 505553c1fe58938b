"""A Llama of 1.2 billion parameters over several processes, by transformers' Trainer or in a loop of its own.

`--how` says what shards it: `fsdp2`, `zero3`, `zero2-lora`, and `ddp` (nothing) for the Trainer, and `loop`, which has
FSDP2.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from benchmarks.commands.full import SIZES, TINY
from benchmarks.commands.texts import Watch, add_arguments, save_strategy

LENGTH = 1024
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj"]


class Full(Dataset[dict[str, torch.Tensor]]):
    """Samples of one length."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self._vocabulary, self._length = vocabulary, length

    def __len__(self) -> int:
        return 1 << 14

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(place)
        tokens = torch.randint(5, self._vocabulary, (self._length,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--how", choices=["fsdp2", "zero3", "zero2-lora", "ddp", "loop"], required=True)
    options = parser.parse_args()
    config = LlamaConfig(**(TINY | {"vocab_size": 512} if options.tiny else SIZES))
    texts = Full(config.vocab_size, 32 if options.tiny else LENGTH)
    watch = Watch(options.per_device_train_batch_size * options.gradient_accumulation_steps)
    (_loop if options.how == "loop" else _trainer)(config, texts, options, watch)
    if os.environ["RANK"] == "0":
        watch.tell()
    dist.destroy_process_group()


def _trainer(config: LlamaConfig, texts: Full, options: argparse.Namespace, watch: Watch) -> None:
    """Train by transformers' Trainer."""
    sharded: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}
    if options.how == "ddp":
        sharded = {}
    elif options.how != "fsdp2":
        stage = {"stage": 3 if options.how == "zero3" else 2, "overlap_comm": torch.cuda.is_available()}
        sized = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
        sharded = {"deepspeed": {**sized, "zero_optimization": stage, "bf16": {"enabled": "auto"}}}
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=options.per_device_train_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        max_steps=options.max_steps if options.max_steps > 0 else 1000,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        learning_rate=1e-5,
        save_strategy=save_strategy(options),
        logging_steps=100,
        report_to=[],
        **sharded,
    )
    model: Any = LlamaForCausalLM(config)
    if options.how == "zero2-lora":
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - the other runs need no peft

        model = get_peft_model(model.to(torch.bfloat16), LoraConfig(r=16, target_modules=ADAPTED))
    Trainer(model=model, args=arguments, train_dataset=texts, callbacks=[watch]).train()


def _loop(config: LlamaConfig, texts: Full, options: argparse.Namespace, watch: Watch) -> None:
    """Train by a loop of its own, with torch's fully_shard."""
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    with device:
        model = LlamaForCausalLM(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for unit in [*model.model.layers, model]:
        fully_shard(unit, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    size, accumulation = options.per_device_train_batch_size, options.gradient_accumulation_steps
    loader = DataLoader(texts, batch_size=size, sampler=DistributedSampler(texts), drop_last=True)
    micro_steps = 0
    while micro_steps != options.max_steps * accumulation:
        for batch in loader:
            on_device = {name: value.to(device) for name, value in batch.items()}
            (model(**on_device).loss / accumulation).backward()
            micro_steps += 1
            if micro_steps % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
            watch.micro_step()
            if micro_steps % accumulation == 0:
                watch.step()
            if micro_steps == options.max_steps * accumulation:
                break


if __name__ == "__main__":
    main()
