"""A model's parameters, buffers and gradients in fixed memory, where CUDA graphs of a micro-step read and write."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from bexp.graphs.recorder import NotCapturableError, Recorder


class TrainingState:
    """The parameters and buffers that graphs read, and the gradients that they add to.

    A parameter whose gradient is taken over by a hook has no gradient of its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = [
            (part._parameters, name, parameter)
            for part in module.modules()
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._owners = [parameter for parameter in self._trained if not parameter._post_accumulate_grad_hooks]
        self._gradients: list[Tensor] = []
        parts = list(module.modules())
        self._modes = [(part, part.training) for part in parts]
        self._contents = [_Contents(there) for part in parts for there in (part._modules, part._parameters) if there]
        self._memory = [(p, p.data_ptr(), p.requires_grad) for p in module.parameters()]
        self._note_buffers()

    @classmethod
    def of(cls, module: nn.Module, recorder: Recorder) -> TrainingState:
        """Return the state of a model.

        Raises:
            NotCapturableError: its gradients are not simply added up in this process.
        """
        problem = recorder.find_problem(list(module.parameters())) or _find_problem(module)
        if problem is not None:
            raise NotCapturableError(problem)
        return cls(module)

    def on_its_device(self) -> AbstractContextManager[Any]:
        """Return a context in which the model's device is the current one, whose streams a recorder takes."""
        return torch.cuda.device_of(self._trained[0])

    def holds(self) -> bool:
        """Return whether the model's parts, parameters and buffers are the same, in the same memory and mode."""
        return (
            all(part.training is training for part, training in self._modes)
            and all(map(_Contents.hold, self._contents))
            and all(map(_Contents.hold, self._buffers))
            and all(p.data_ptr() == address and p.requires_grad is trains for p, address, trains in self._memory)
            and all(buffer.data_ptr() == address for buffer, address in self._buffer_memory)
        )

    @contextmanager
    def borrowed(self) -> Iterator[set[int]]:
        """Give modules other parameters in the same memory within the context, whose gradients are the fixed ones.

        The other parameters are new to autograd. The model's own may belong to a loss that is still alive, on a stream
        that no capture may touch. Afterwards their gradients and all buffers are as before. The context yields a set:
        the numbers of the fixed gradients that a backward has added to.

        Raises:
            NotCapturableError: parameters are used without the modules that have them, or buffers are replaced.
        """
        if not self._gradients:
            self._gradients = [torch.zeros_like(parameter) for parameter in self._owners]
        reached: set[int] = set()
        others = {id(parameter): _in_same_memory(parameter) for parameter in self._trained}
        for number, (parameter, fixed) in enumerate(zip(self._owners, self._gradients, strict=True)):
            other = others[id(parameter)]
            other.grad = fixed
            other.register_post_accumulate_grad_hook(lambda _, number=number: reached.add(number))
        kept = [parameter.grad for parameter in self._trained]
        for parameter in self._trained:
            parameter.grad = None
        buffers = [
            (part._buffers, name, buffer, buffer.detach().clone())
            for part in self._module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        for owner, name, parameter in self._places:
            owner[name] = others.get(id(parameter), parameter)
        try:
            yield reached
        finally:
            for owner, name, parameter in self._places:
                owner[name] = parameter
            strays = [parameter for parameter in self._trained if parameter.grad is not None]
            for parameter, gradient in zip(self._trained, kept, strict=True):
                parameter.grad = gradient
            replaced = [name for there, name, buffer, _ in buffers if there.get(name) is not buffer]
            with torch.no_grad():
                for there, name, buffer, value in buffers:
                    there[name] = buffer
                    buffer.copy_(value)
            self._note_buffers()  # the first run may have added some
        if strays:
            raise NotCapturableError("parameters are used without the modules that have them")
        if replaced:
            raise NotCapturableError(f"the buffer '{replaced[0]}' is replaced, which no graph repeats")

    def attach(self, reached: Collection[int]) -> None:
        """Make the fixed gradients their parameters' own, with the present values, or zero where there is none.

        Parameters that are not `reached` keep theirs: an optimizer leaves parameters without a gradient alone.
        """
        empty = []
        for number in reached:
            parameter, gradient = self._owners[number], self._gradients[number]
            present = parameter.grad
            if present is gradient:
                continue
            if present is None:
                empty.append(gradient)
            else:
                gradient.copy_(present)
            parameter.grad = gradient
        if empty:
            torch._foreach_zero_(empty)

    def _note_buffers(self) -> None:
        self._buffers = [_Contents(part._buffers) for part in self._module.modules() if part._buffers]
        self._buffer_memory = [(buffer, buffer.data_ptr()) for buffer in self._module.buffers()]


class _Contents:
    """The earlier contents of a module's dictionary."""

    __slots__ = ("_kept", "_there")

    def __init__(self, there: dict[str, Any]) -> None:
        self._there = there
        self._kept = tuple(there.values())

    def hold(self) -> bool:
        """Return whether the dictionary has the same objects now."""
        return len(self._there) == len(self._kept) and all(map(is_, self._there.values(), self._kept))


def _in_same_memory(parameter: nn.Parameter) -> nn.Parameter:
    other = nn.Parameter(parameter.detach())
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        other.register_post_accumulate_grad_hook(hook)
    return other


def _find_problem(module: nn.Module) -> str | None:
    """Return why gradients do not simply add up in place; None if they do."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "processes exchange gradients by hooks, which no graph repeats"
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        return "no parameter is trained"
    for parameter in trained:
        hooks: Sequence[Any] = tuple((parameter._post_accumulate_grad_hooks or {}).values())
        if parameter._backward_hooks or not all(getattr(hook, "is_replayable", False) for hook in hooks):
            return "parameters have hooks, which no graph repeats"
        if type(parameter) is not nn.Parameter:
            return f"a parameter is a {type(parameter).__name__}"
    for part in module.modules():
        if part._backward_hooks or part._backward_pre_hooks or hasattr(part, "_hf_hook"):
            return f"{type(part).__name__} has hooks, which no graph repeats"
    return None
