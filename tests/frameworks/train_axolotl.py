"""Trains a tiny model by Axolotl's own command as an export says, in one process on the CPU.

What Axolotl holds must be what was promised: parameters, their gradients, moments, and the peak of a micro-step.
Its tokenizer and its texts are made here. A text fills its sequence.
"""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, training_args

from bexp.measure.memory_meters import LiveStorages

TOLERANCE = 0.03
STEPS = 3

folder = Path(sys.argv[1])
promise = json.loads((folder / "promise.json").read_text())
settings = yaml.safe_load((folder / "export").read_text())
config = json.loads((folder / "config.json").read_text())
held: list[dict[str, int]] = []
peaks: list[int] = []
formats: dict[str, torch.dtype] = {}
micro_step = Trainer.training_step


def prepare() -> Path:
    """Write a model, its tokenizer, texts, and the export with what it leaves to a person."""
    words = ["<unk>", "<s>", "</s>", "<pad>", *(f"w{number}" for number in range(config["vocab_size"] - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), words, strict=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder / "model")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).save_pretrained(
        folder / "model"
    )
    length = settings["sequence_len"] - 1  # Axolotl ends each text
    texts = [" ".join(words[4 + (row + place) % 100] for place in range(length)) for row in range(64)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    own = {
        "base_model": str(folder / "model"),
        "datasets": [{"path": str(folder / "texts.jsonl"), "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / "out"),
        "learning_rate": 1e-2,
        "max_steps": STEPS,
    }
    (folder / "axolotl.yaml").write_text(yaml.safe_dump(own | settings))
    return folder / "axolotl.yaml"


def num_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Note what is held when the optimizer is about to step."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [state for each in optimizer.state.values() for name, state in each.items() if name != "step"]
    gradients = num_bytes(parameter.grad for parameter in trained)
    held.append({"parameters": num_bytes(trained), "gradients": gradients, "optimizer_states": num_bytes(states)})


def measured_micro_step(trainer: Trainer, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
    """Note the peak of the first micro-step, which allocates the gradients."""
    formats.update((name, parameter.dtype) for name, parameter in model.named_parameters())
    given = [tensor for tensor in inputs.values() if isinstance(tensor, torch.Tensor)]
    with LiveStorages([*model.parameters(), *model.buffers(), *given]) as storages:
        loss = micro_step(trainer, model, inputs, *rest, **named)
    peaks.append(storages.peak_bytes)
    return loss


def main() -> None:
    from axolotl.cli.train import do_cli  # not above: its processes for data import this file

    setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)  # noqa: B010 - a CPU has bfloat16 as well
    setattr(Trainer, "training_step", measured_micro_step)  # noqa: B010 - mypy refuses a method as a target
    register_optimizer_step_pre_hook(note)
    do_cli(str(prepare()))

    wide = {name for name, dtype in formats.items() if dtype is torch.float32}
    assert wide == {name for name in formats if "norm" in name or "embed_tokens" in name}, wide
    assert {formats[name] for name in formats.keys() - wide} == {torch.bfloat16}
    assert len(held) == STEPS
    found = held[-1] | {"micro_step_peak": peaks[0]}
    for name, size in found.items():
        assert abs(size - promise[name]) <= TOLERANCE * promise[name], (name, size, promise[name])
    sys.stdout.write(f"held: {found}\npromised: {promise}\n")


if __name__ == "__main__":
    main()
