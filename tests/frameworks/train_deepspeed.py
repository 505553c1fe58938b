"""Trains a tiny model by DeepSpeed's own engine as an export says, in one process on the CPU.

What the engine holds must be what was promised: parameters, their gradients, float32 master weights and moments, and
the gradients in float32 that exist while the optimizer steps.
"""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}

import deepspeed
import torch
from torch._C._distributed_c10d import HashStore
from transformers import AutoConfig, AutoModelForCausalLM

TOLERANCE = 0.03
STEPS = 2

folder = Path(sys.argv[1])
promise = json.loads((folder / "promise.json").read_text())
settings = json.loads((folder / "export").read_text())
config = json.loads((folder / "config.json").read_text())

torch.manual_seed(0)
torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
# It compiles a library, which one process never calls. The package hides the module behind another name.
setattr(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None)  # noqa: B010 - a module has no such name to mypy
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)


def num_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def masters() -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def note(*_: Any) -> None:
    """Note what is held when the optimizer is about to step."""
    held.append(
        {
            "parameters": num_bytes(model.parameters()),
            "gradients": num_bytes(parameter.grad for parameter in model.parameters()),
            "master_weights": num_bytes(masters()),
            "converted_gradients": num_bytes(parameter.grad for parameter in masters()),
        }
    )


held: list[dict[str, int]] = []
optimizer.register_step_pre_hook(note)
tokens = torch.randint(config["vocab_size"], (settings["train_micro_batch_size_per_gpu"], 16))
before = [parameter.detach().clone() for parameter in model.parameters()]
for _ in range(STEPS * settings["gradient_accumulation_steps"]):
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
moments = [state for each in optimizer.state.values() for name, state in each.items() if name != "step"]

assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
assert {tensor.dtype for tensor in [*masters(), *moments]} == {torch.float32}
assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)), "it trained"
assert len(held) == STEPS
for found in held:
    for name, size in (found | {"optimizer_states": num_bytes(moments)}).items():
        assert abs(size - promise[name]) <= TOLERANCE * promise[name], (name, size, promise[name])
sys.stdout.write(f"held as promised: {promise}\n")
