"""Runs the modules with Lightning and uses what they define, on a CPU and one device."""

import sys
from pathlib import Path
from typing import Any

import torch

for path in sorted(Path(sys.argv[1]).iterdir()):
    code = path.read_text().replace('accelerator="gpu"', 'accelerator="cpu"').replace("devices=8", "devices=1")
    code = code.replace("num_nodes != 8", "num_nodes != 1")
    scope: dict[str, Any] = {}
    exec(compile(code, path.name, "exec"), scope)
    if "FSDPStrategy" in scope:  # Lightning makes one only where there is a GPU
        strategy = code.split("strategy=", 1)[1].split(",\n")[0]
        made = eval(strategy, scope | {"layer_class": torch.nn.Linear})
        policy = made.kwargs["auto_wrap_policy"]
        assert policy(module=torch.nn.Linear(1, 1), recurse=False, nonwrapped_numel=0), path.name
    else:
        trainer = scope["make_trainer"](logger=False, enable_checkpointing=False, barebones=False)
        processes = 8 if "devices=8" in path.read_text() else 1
        batch = trainer.accumulate_grad_batches * scope["MICRO_BATCH_SIZE"] * processes
        assert batch == {".no_batch": 8, ".replaced": 96}.get(path.suffix, 512), path.name
        autocast = path.suffix in {".autocast", ".master"} or "lora" in path.suffix
        assert trainer.precision == ("bf16-mixed" if autocast else "bf16-true"), path.name
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(16))
    if "recompute" in scope:
        scope["recompute"](layers)
        wrapped = sum(type(layer).__name__ == "CheckpointWrapper" for layer in layers)
        assert wrapped == (4 if path.suffix == ".partial" else 16), path.name
    if "attention" in scope:
        with scope["attention"]():
            pass
