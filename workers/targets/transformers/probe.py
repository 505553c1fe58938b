"""What can be set on a model here, found by running its layers at micro-batch 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from bexp.explorer.cost.request_texts import text_batches
from bexp.explorer.cost.text_batches import TextBatch
from bexp.explorer.dimensions.candidate import CHOICES
from bexp.explorer.dimensions.dimension import Choice, CodePart
from bexp.explorer.dimensions.execution import EXECUTION
from bexp.explorer.dimensions.experts import LIBRARY_EXPERTS, WAITING_EXPERTS
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.expert_kernels import NAMED_EXPERTS
from bexp.explorer.model.hardware import NAME_IT, WITH_ADAPTERS, BackendSupport
from bexp.explorer.model.lengths import PACKED
from bexp.explorer.model.spelling import shortened
from bexp.explorer.request.request import ExplorationRequest
from bexp.graphs.recorder import CudaRecorder
from bexp.graphs.training_state import TrainingState
from bexp.out_of_memory import is_out_of_memory
from bexp.transformers.experts import OURS, expert_modules
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings, SettingsError
from bexp.workers.instruments.back_ends import NO_GRAPHS, execution_support
from bexp.workers.targets.transformers.batch import arranged, is_flattened
from bexp.workers.targets.transformers.builder import PartsBuilder
from bexp.workers.targets.transformers.passes import LayerPasses
from bexp.workers.targets.transformers.quantized import keeps_inputs
from bexp.workers.targets.transformers.resolved import ResolvedModel
from bexp.workers.targets.transformers.results import DifferenceError, require_alike, results_of, results_of_shell

_NAMES = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}


@contextmanager
def recorded_choices() -> Iterator[list[str]]:
    """Within the context, the back end of each call of scaled_dot_product_attention is appended to the list."""
    original, chosen = F.scaled_dot_product_attention, []

    def attend(*args: Any, **kwargs: Any) -> Any:
        scale, grouped = kwargs.pop("scale", None), kwargs.pop("enable_gqa", False)
        kwargs |= {"scale": scale, "enable_gqa": grouped}
        choice = torch._fused_sdp_choice(*args, **kwargs)
        chosen.append(_NAMES.get(int(choice), str(choice)))
        return original(*args, **kwargs)

    F.scaled_dot_product_attention = attend
    try:
        yield chosen
    finally:
        F.scaled_dot_product_attention = original


PINNED = {"cuda": ("flash", "cudnn", "efficient", "math"), "cpu": ("math",)}
"""Back ends of torch's attention that a device has more than one of."""
STOCK_EXPERTS = ("eager", "batched_mm", "grouped_mm")
"""Experts implementations of the library that need no other package."""
SLOW_EXPERTS = ("eager", "batched_mm")
"""On a GPU these are tried when a request names them: a loop over experts, and a gather of weights for every token."""
_REFUSALS = (SettingsError, RuntimeError, ValueError, ImportError, NotImplementedError, TypeError)


class SettingsProbe:
    """Tries settings on one layer of each kind that `builder` makes."""

    def __init__(self, resolved: ResolvedModel, builder: PartsBuilder, request: ExplorationRequest) -> None:
        self._resolved = resolved
        self._builder = builder
        self._request = request
        self._device: torch.device = builder.device
        self._space = request.space_on(self._device.type)
        batches = text_batches(request, 1 if request.batching in PACKED else 2)  # of one text none is padded
        self._texts = TextBatch.whole(1, request.seq_length)
        if batches is not None:  # a packed row of one text has no mask, which some back ends cannot take
            self._texts = next((one for one in reversed(batches.measured) if not one.is_whole), batches.longest)

    @property
    def default_attention(self) -> str:
        """The library's own choice."""
        return self._resolved.model.config._attn_implementation or "eager"

    def attention_supports(self) -> tuple[BackendSupport, ...]:
        """The library's choice, each back end of torch that can be pinned, and on a GPU flash attention's own packages.

        Others are tried when a request names them.
        A pinned back end that torch would choose anyway is the library's choice under another name, and left out. So is
        the library's choice if it is flash attention, which a request may exclude.
        """
        default, asked = self.default_attention, self._request.attention_backends or ()
        with recorded_choices() as chosen:
            supports = [BackendSupport(name=default, usable=True, reason=self.refusal(Settings(attention=default)))]
        same = f"sdpa:{chosen[0]}" if len(set(chosen)) == 1 else None
        without_flash = "flash" in chosen and not self._request.flash_attention
        if without_flash:
            supports = [BackendSupport(name=default, usable=False, reason="it takes flash here, which is excluded")]
        if default == "sdpa":
            for backend in PINNED[self._device.type]:
                name = f"sdpa:{backend}"
                spared = backend == "math" and not (without_flash and self._device.type == "cpu")
                only_when_named = name == same or spared
                if only_when_named and name not in asked:
                    reason: str | None = (
                        f"sdpa takes {backend} here" if name == same else "it keeps all scores: name it to try it"
                    )
                else:
                    reason = self.refusal(Settings(attention=name))
                supports.append(
                    BackendSupport(name=name, usable=reason is None, reason=reason, only_when_named=only_when_named)
                )
        others = [name for name in self._resolved.attention_implementations if name != default]
        for name in others:
            reason = self._resolved.attention_implementations[name]
            is_default = reason is None and self._is_installed_flash(name)
            if reason is None:
                reason = self.refusal(Settings(attention=name)) if is_default or name in asked else NAME_IT
            stock = not name.startswith("flash_attention")
            supports.append(
                BackendSupport(
                    name=name, usable=reason is None, reason=reason, stock=stock, only_when_named=not is_default
                )
            )
        return tuple(map(self._kept_apart, supports)) if self._request.batching in PACKED else tuple(supports)

    def _kept_apart(self, support: BackendSupport) -> BackendSupport:
        """A back end that can be had, unless packed texts see one another with it."""
        reason = (
            self._resolved.find_leak(
                self._device, support.name, flattened=self._request.flattens or is_flattened(support.name)
            )
            if support.usable
            else None
        )
        return support if reason is None else support.model_copy(update={"usable": False, "reason": reason})

    def _is_installed_flash(self, name: str) -> bool:
        """Whether a default space has an attention of the library that can be set: a package of flash attention's."""
        wanted = self._request.flash_attention and not self._request.quick
        return name.startswith("flash_attention") and self._device.type == "cuda" and wanted

    def expert_supports(self) -> tuple[BackendSupport, ...]:
        """The library's implementations and, on a GPU, ours; empty for a model without experts."""
        if not self._resolved.experts_implementations:
            return ()
        others = sorted(LIBRARY_EXPERTS - {*STOCK_EXPERTS})
        ours = OURS if self._device.type == "cuda" else ()
        return tuple(map(self._expert_support, (*STOCK_EXPERTS, *others, *ours)))

    def _expert_support(self, name: str) -> BackendSupport:
        """Whether the model can have one; the slow ones, and those that seldom win, are tried when they are named."""
        only_when_named = name in NAMED_EXPERTS or (self._device.type == "cuda" and name in SLOW_EXPERTS)
        reason = self._resolved.experts_implementations.get(name)
        if reason is None and only_when_named and name not in (self._request.expert_backends or ()):
            reason = NAME_IT
        if reason is None:
            reason = self.refusal(Settings(experts=name))
        if reason is None and name in OURS and self._adapts_experts():
            difference = self._difference(Settings(experts=name), with_experts_alone=True)
            reason = difference and f"{WITH_ADAPTERS}, {difference}"
        stock = name in STOCK_EXPERTS
        return BackendSupport(
            name=name, usable=reason is None, reason=reason, stock=stock, only_when_named=only_when_named
        )

    def choice_supports(self) -> dict[str, tuple[BackendSupport, ...]]:
        """Which values of each choice can be had here, by dimension; without those where there is nothing to choose."""
        found = {choice.name: self._supports(choice) for choice in CHOICES if choice is not EXECUTION}
        found[EXECUTION.name] = self.execution_supports()
        return {name: supports for name, supports in found.items() if supports}

    def _supports(self, choice: Choice[Any]) -> tuple[BackendSupport, ...]:
        values = choice.considered(self._space.place)
        if values == (choice.plain,):
            return ()
        return tuple(self._support(choice, value) for value in dict.fromkeys((choice.plain, *values)))

    def _support(self, choice: Choice[Any], value: Any) -> BackendSupport:
        if not choice.is_tried(value):
            return BackendSupport(name=value, usable=True)
        settings = Settings.of({choice.name: value})
        if choice.part is CodePart.SHELL:
            shell = self._builder.shell(1)
            reason = self._differs(lambda: results_of_shell(shell), shell.model, settings)
        else:
            reason = self._difference(settings)
        return BackendSupport(name=value, usable=reason is None, reason=reason, stock=False, only_when_named=True)

    def execution_supports(self) -> tuple[BackendSupport, ...]:
        """The executions that can be had here, if there is a choice; for graphs, a layer of each kind is captured."""
        if len(self._space.executions) == 1 and not self._space.replays:
            return ()
        return execution_support(self._graph_refusal() if self._space.replays else NO_GRAPHS)

    def _graph_refusal(self) -> str | None:
        """Why a layer cannot be replayed as CUDA graphs; None if each kind can."""
        if self._device.type != "cuda":
            return NO_GRAPHS
        asked = self._request.expert_backends or ("grouped_mm",)
        experts = next((name for name in asked if name not in WAITING_EXPERTS), None)
        for kind in dict.fromkeys(self._resolved.kinds):
            part = self._builder.layer(kind, 1)
            settings = Settings(experts=experts if expert_modules(part.module) else None)
            try:
                passes = LayerPasses(part, self._builder.settings, settings, recompute=None)
                try:
                    _capture(passes)
                finally:
                    passes.release()
                    passes.restore()
            except _REFUSALS as error:
                return _refusal_of(error)
        return None

    def _adapts_experts(self) -> bool:
        """Whether a layer's experts have adapters, whose product is added to the weights in every forward."""
        return self._request.training.lora is not None and any(map(_trains_experts, self._resolved.layers))

    def _difference(self, settings: Settings, *, with_experts_alone: bool = False) -> str | None:
        """Why a setting cannot be had, or what a layer of some kind computes otherwise with it; None if neither."""
        for kind in dict.fromkeys(self._resolved.kinds):
            part = self._builder.layer(kind, 1)
            has_experts = bool(expert_modules(part.module))
            if with_experts_alone and not has_experts:
                continue
            reason = self._differs(partial(results_of, part), part.module, settings, has_experts)
            if reason is not None:
                return reason
        return None

    def _differs(
        self, run: Callable[[], dict[str, Tensor]], module: nn.Module, settings: Settings, moves_tokens: bool = False
    ) -> str | None:
        """Why `module` cannot have a setting, or what `run` finds to be different with it; None if neither."""
        try:
            expected = run()
            applied = set_up(module, settings)
            try:
                require_alike(run(), expected, moves_tokens=moves_tokens)
            finally:
                applied.undo()
        except (*_REFUSALS, DifferenceError) as error:
            return _error_text(error)
        return None

    def layer_recompute_refusal(self) -> str | None:
        """Why layers cannot be recomputed as a whole, or free next to nothing if they are; None if neither."""
        for kind in dict.fromkeys(self._resolved.kinds if self._builder.settings.quantization is not None else ()):
            if keeps_inputs(self._builder.layer(kind, 1)):
                return "its quantised layers keep their inputs, whatever is recomputed"
        return self.refusal(Settings(recompute="full"))

    def offload_refusal(self) -> str | None:
        """Why what layers save cannot lie in the host's memory; None if it can."""
        if self._device.type == "cpu":
            return "the host's memory is the device's own"
        return self.refusal(Settings(recompute=Recompute.OFFLOAD))

    def refusal(self, settings: Settings) -> str | None:
        """Why a setting cannot be had here, found by running a layer of each kind with it; None if it can."""
        for kind in dict.fromkeys(self._resolved.kinds):
            attention = settings.attention or self.default_attention
            part = self._builder.layer(kind, arranged(self._texts, attention, flattens=self._request.flattens))
            if settings.experts is not None and not expert_modules(part.module):
                continue
            try:
                passes = LayerPasses(part, self._builder.settings, settings, recompute=None)
                try:
                    passes.prepare_forward()
                    passes.forward()
                    if self._builder.settings.training:
                        passes.prepare_backward()
                        passes.backward()
                finally:
                    passes.release()
                    passes.restore()
            except _REFUSALS as error:
                return _refusal_of(error)
        return None


def _trains_experts(layer: nn.Module) -> bool:
    """Whether what wraps the experts of a layer, or they themselves, have trained parameters."""
    experts = {id(module) for module in expert_modules(layer)}
    names = {path.split(".base_layer")[0] for path, module in layer.named_modules() if id(module) in experts}
    trained = [path for path, parameter in layer.named_parameters() if parameter.requires_grad]
    return any(path.startswith(f"{name}.") for path in trained for name in names)


def _capture(passes: LayerPasses) -> None:
    """Record both passes as graphs, with parameters in a new place in autograd as in training, and drop them.

    Raises:
        NotCapturableError: that is impossible.
    """

    def forward() -> None:
        passes.prepare_forward()
        passes.forward()

    def backward() -> None:
        passes.prepare_backward()
        passes.backward()

    def both() -> None:
        forward()
        backward()

    recorder = CudaRecorder()
    with TrainingState(passes.module).borrowed():
        both()  # draws the incoming gradients
        recorder.warm_up(both)
        recorder.record((forward, backward))


def _refusal_of(error: Exception) -> str | None:
    """Return why a setting cannot be had. A lack of memory says nothing about that; trials with it have the outcome."""
    return None if is_out_of_memory(error) else _error_text(error)


def _error_text(error: Exception) -> str:
    return shortened(" ".join(str(error).split()) or type(error).__name__, 300)
