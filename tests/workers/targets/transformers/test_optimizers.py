"""Optimizers of other libraries: the bytes of their real state, and how transformers' Trainer makes them.

Those of bitsandbytes and torchao run where these are installed: `make test-frameworks`.
"""

from __future__ import annotations

import gc
import importlib.util
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from bexp.explorer.cost.step import static_parts
from bexp.explorer.model.optimizers import LIBRARY, LIBRARY_NAMES
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.targets.transformers.training_run import TrainerOptimizer, make_optimizer, state_bytes
from tests.workers.targets.transformers.targets import HARDWARE, candidate, open_target, opened

transformers = pytest.importorskip("transformers")

HERE = [
    name
    for name, known in LIBRARY.items()
    if not known.is_on_host and (known.package is None or importlib.util.find_spec(known.package))
]
BLOCK = 256
"""Elements that share a scale."""
FEWEST = 4096
"""Tensors with fewer elements keep 32 bits."""


def stepped(name: str) -> tuple[torch.optim.Optimizer, nn.Embedding, nn.Linear]:
    """An optimizer of an embedding with 8,192 numbers, and of a matrix with 16,384 and its bias with 128."""
    embedding, linear = nn.Embedding(64, 128), nn.Linear(128, 128)
    parameters = [*embedding.parameters(), *linear.parameters()]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = make_optimizer(name, parameters, 1e-4, [embedding])
    optimizer.step()
    return optimizer, embedding, linear


def quantized(numel: int, bits: int) -> int:
    """Codes and the scales of their blocks."""
    return numel * bits // 8 + 4 * -(-numel // BLOCK)


TABLE = 4 * 256
"""What eight bits stand for, as float32 numbers; all tensors of an optimizer share it."""
BYTES = {
    "adagrad": 4 * (8192 + 16384 + 128) + 3 * 4,
    "rmsprop": 4 * (8192 + 16384 + 128) + 3 * 4,
    "adafactor": 4 * (64 + 128 + 128 + 128 + 128) + 3 * 4,  # rows and columns, all of the bias, and a norm of each
    "adamw_bnb_8bit": 2 * (4 * 8192 + quantized(16384, 8) + 4 * 128 + TABLE),
    "paged_adamw_8bit": 2 * (4 * 8192 + quantized(16384, 8) + 4 * 128 + TABLE),
    "paged_adamw_32bit": 2 * 4 * (8192 + 16384 + 128),
    "lion_8bit": 4 * 8192 + quantized(16384, 8) + 4 * 128 + TABLE,
    "lion_32bit": 4 * (8192 + 16384 + 128),
    "ademamix": 3 * 4 * (8192 + 16384 + 128),
    "muon": 4 * (2 * 8192 + 16384 + 2 * 128) + 2 * 4,  # a momentum of the matrix, and AdamW's state of all else
    "ademamix_8bit": 3 * (4 * 8192 + quantized(16384, 8) + 4 * 128) + 2 * TABLE,
}


@pytest.mark.parametrize("name", [name for name in BYTES if name in HERE])
def test_the_bytes_of_a_state_are_those_of_the_real_one(name: str) -> None:
    optimizer, _, _ = stepped(name)
    assert state_bytes(optimizer) == BYTES[name]


@pytest.mark.parametrize(("name", "bits"), [("adamw_torch_8bit", 8), ("adamw_torch_4bit", 4)])
def test_scales_and_tables_of_a_quantized_state_count(name: str, bits: int) -> None:
    if name not in HERE:
        pytest.skip("torchao is not installed")
    optimizer, _, _ = stepped(name)
    codes = sum(2 * quantized(numel, bits) for numel in (8192, 16384))
    rest = 2 * 4 * 128 + 3 * 4  # the bias, and the number of steps of each tensor
    tables = state_bytes(optimizer) - codes - rest
    assert 0 < tables <= 2 * 2 * 4 * 2**bits, "a table for each tensor and moment at most"


@pytest.mark.parametrize("name", [name for name in HERE if name in LIBRARY_NAMES])
def test_an_optimizer_is_made_as_the_trainer_makes_it(name: str, tmp_path: Path) -> None:
    optimizer, embedding, _ = stepped(name)
    arguments = transformers.TrainingArguments(output_dir=tmp_path, optim=LIBRARY_NAMES[name], use_cpu=True)
    kind, fields = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments)
    theirs = kind([{"params": list(embedding.parameters()), "weight_decay": arguments.weight_decay}], **fields)
    assert type(optimizer) is type(theirs)
    ignored = {"params", "lr", "initial_lr"}
    ours, wanted = ({k: v for k, v in each.param_groups[0].items() if k not in ignored} for each in (optimizer, theirs))
    assert ours == wanted


@pytest.mark.parametrize("name", HERE)
def test_a_model_is_gone_once_its_optimizer_is(name: str) -> None:
    stepped(name)  # what it imports may keep the frames of its callers
    optimizer, embedding, linear = stepped(name)
    model = weakref.ref(embedding)
    del optimizer, embedding, linear
    gc.collect()
    assert model() is None


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr("bexp.workers.targets.transformers.training_run.import_module", fail)
    for name, package in (("lion_8bit", "bitsandbytes"), ("adamw_torch_4bit", "torchao")):
        with pytest.raises(UnsupportedTrialError, match=rf"needs {package}: pip install 'bexp\[{package}\]'"):
            make_optimizer(name, [nn.Parameter(torch.ones(2))], 1e-4)


@pytest.mark.parametrize("name", HERE)
def test_the_parts_hold_as_many_bytes_of_state_as_the_whole_model(name: str) -> None:
    target, parts, request = opened(training={"optimizer": {"name": name}})
    assert parts.optimizer_state_bytes is not None
    with target.training_run(candidate(), parts, request) as run:
        run.begin()
        run.step()
        assert run._optimizer is not None
        whole = run._optimizer.state_bytes
    assert parts.optimizer_state_bytes == pytest.approx(whole, rel=0.02), "steps and tables are counted by part"
    assert static_parts(parts, request).optimizer_states == parts.optimizer_state_bytes


def test_reading_the_state_leaves_no_gradients() -> None:
    target = open_target(training={"optimizer": {"name": "adafactor"}})
    target.report(HARDWARE)
    builder = target._parts()
    assert all(parameter.grad is None for parameter in builder.shell(1).model.parameters())


def test_an_optimizer_that_cannot_step_is_a_named_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TrainerOptimizer) -> None:
        raise RuntimeError("no binary for\nthis device")

    monkeypatch.setattr(TrainerOptimizer, "step", fail)
    with pytest.raises(UnsupportedTrialError, match="optimizer 'adafactor' does not work here: no binary for this"):
        open_target(training={"optimizer": {"name": "adafactor"}}).report(HARDWARE)


@pytest.mark.parametrize(("name", "device", "adds_up"), [("rmsprop", "cuda", True), ("adafactor", "cuda", False)])
def test_temporaries_of_kernels_over_all_parameters_add_up(
    monkeypatch: pytest.MonkeyPatch, name: str, device: str, adds_up: bool
) -> None:
    target, parts, request = opened(training={"optimizer": {"name": name}})
    monkeypatch.setattr(target, "_device", torch.device(device))
    assert [part.adds_up for part in target.optimizer_parts(candidate(), parts, request)] == [adds_up] * 2
