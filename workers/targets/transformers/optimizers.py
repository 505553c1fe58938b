"""The optimizers of other libraries, made as transformers' Trainer makes them, and the bytes of their real state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from bexp.explorer.model.optimizers import BITSANDBYTES, LIBRARY, TORCHAO
from bexp.transformers.offload import pinned_bytes
from bexp.workers.instruments.failures import UnsupportedTrialError

BETAS = (0.9, 0.999)
"""TrainingArguments' defaults."""
BLOCK_SIZE = 256
"""Elements that share a scale in torchao's states; the Trainer's default."""
EXTRAS = {BITSANDBYTES: "bitsandbytes", TORCHAO: "torchao"}
"""The extras of this package that install them."""


def make_optimizer(
    name: str, parameters: list[nn.Parameter], learning_rate: float, embeddings: Sequence[nn.Embedding] = ()
) -> torch.optim.Optimizer:
    """Return an optimizer of LIBRARY. As in the Trainer, eight-bit ones keep 32 bits for weights of `embeddings`.

    Raises:
        UnsupportedTrialError: its package is missing, or does not work here.
    """
    package = LIBRARY[name].package
    if package is None:
        return _of_torch(name, parameters, learning_rate)
    try:
        module: Any = import_module(f"{package}.optim")
    except Exception as error:  # a library that is broken in any way
        raise UnsupportedTrialError(
            f"optimizer '{name}' needs {package}: pip install 'bexp[{EXTRAS[package]}]' ({error})"
        ) from error
    made: torch.optim.Optimizer
    if package == TORCHAO:
        if LIBRARY[name].is_on_host:
            kind = partial(module.CPUOffloadOptimizer, optimizer_class=torch.optim.AdamW)
        else:
            kind = module.AdamW4bit if name.endswith("4bit") else module.AdamW8bit
            kind = partial(kind, block_size=BLOCK_SIZE)
        made = kind(parameters, lr=learning_rate, betas=BETAS, weight_decay=0.0)
        return made
    bits = 8 if name.endswith("8bit") else 32
    # Its manager knows parameters by their places alone, and would take those of one optimizer for another's.
    module.GlobalOptimManager._instance = None
    if name.startswith("ademamix"):
        made = module.AdEMAMix(parameters, lr=learning_rate, weight_decay=0.0, optim_bits=bits)
    else:
        kind = module.Lion if name.startswith("lion") else module.AdamW
        made = kind(parameters, lr=learning_rate, betas=BETAS, weight_decay=0.0, optim_bits=bits)
    if bits == 8:  # by their places, because the manager would hold on to a registered module
        kept = {id(each.weight) for each in embeddings}
        places = (place for place, parameter in enumerate(parameters) if id(parameter) in kept)
        module.GlobalOptimManager.get_instance().index2config.update({(0, i): {"optim_bits": 32} for i in places})
    return made


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of an optimizer's state on the device; a tensor that several parameters share counts once.

    torchao's optimizer on the host steps small parameters on the device.
    """
    if hasattr(optimizer, "d_opt"):
        return 0 if optimizer.d_opt is None else state_bytes(optimizer.d_opt)
    sizes: dict[int, int] = {}
    for state in optimizer.state.values():
        for value in state.values():
            for tensor in _plain(value) if isinstance(value, Tensor) else ():
                sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def host_bytes(optimizer: Any) -> int:
    """Return the bytes of torchao's optimizer in the host's memory: states, and pinned weights and gradients."""
    pinned = [tensor for weight in optimizer.param_d2h_map.values() for tensor in (weight, weight.grad)]
    return sum(map(pinned_bytes, pinned)) + sum(map(state_bytes, optimizer.optim_dict.values()))


def _of_torch(name: str, parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    if name == "adafactor":
        from transformers.optimization import Adafactor  # noqa: PLC0415 - the library's own

        made: torch.optim.Optimizer = Adafactor(
            parameters, lr=learning_rate, scale_parameter=False, relative_step=False
        )
        return made
    kind = torch.optim.Adagrad if name == "adagrad" else torch.optim.RMSprop
    return kind(parameters, lr=learning_rate)


def _plain(tensor: Tensor) -> list[Tensor]:
    """The tensors of which a tensor consists: codes and scales of a quantized one, or the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _plain(getattr(tensor, name))]
