"""Muon as it is commonly trained with: matrices of hidden layers by torch's own, everything else by fused AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

MOMENTUM = 0.95
"""Of Muon; torch's default, and that of Axolotl and LLaMA-Factory."""


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon and fused torch.optim.AdamW as one optimizer, with one state and one schedule.

    Muon steps the parameters of two dimensions outside of `outer`. A tensor that holds all experts of a layer has
    three dimensions, so AdamW steps it.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        outer: Iterable[nn.Module],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = MOMENTUM,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(f"torch {torch.__version__} has no Muon: it needs torch 2.9")
        matrices, others = hidden_matrices(parameters, outer)
        self._steppers: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
            self._steppers.append(muon)
        if others:
            self._steppers.append(torch.optim.AdamW(others, lr=lr, betas=betas, weight_decay=weight_decay, fused=True))
        super().__init__([group for each in self._steppers for group in each.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step both; return the loss of `closure`, if there is one."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for stepper, group in zip(self._steppers, self.param_groups, strict=True):
            stepper.param_groups, stepper.state = [group], self.state  # which a schedule or a checkpoint has replaced
            stepper.step()
        return loss


def hidden_matrices(
    parameters: Iterable[nn.Parameter], outer: Iterable[nn.Module]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of two dimensions that are in no module of `outer`, and all others."""
    apart = {id(parameter) for module in outer for parameter in module.parameters()}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.ndim == 2 and id(parameter) not in apart else others).append(parameter)
    return matrices, others


def outer_modules(model: nn.Module) -> list[nn.Module]:
    """Return a model's embeddings and its output layer, which are no hidden layers."""
    named = [getattr(model, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return [*embeddings, *(module for module in named if isinstance(module, nn.Module))]


def muon(model: nn.Module, *, lr: float, **others: Any) -> MuonWithAdamW:
    """Return Muon for the trained parameters of a transformers model, as it is measured for `--optim muon`.

    Give it to a Trainer as `Trainer(optimizers=(bexp.muon(model, lr=5e-5), None))`.

    Args:
        model: the model with all its adapters, before it is wrapped or sharded.
        lr: the learning rate of both; Muon's is scaled so that its updates are as large as AdamW's
            (Liu et al., 2025, arXiv:2502.16982).
        others: `weight_decay`, the `momentum` of Muon, and the `betas` of AdamW.

    Raises:
        RuntimeError: torch is older than 2.9, and has no Muon.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return MuonWithAdamW(trained, outer_modules(model), lr=lr, **others)
