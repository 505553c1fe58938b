"""The target `transformers`: the classes of the installed library, measured by their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings, SettingsError
from explorer.cost_model.components import BlockRecompute, Component, ComponentKind
from explorer.spec.candidate import Candidate, Recompute
from explorer.spec.hardware import BackendSupport, DeviceReport, HardwareSpec
from explorer.spec.model import DType
from explorer.spec.parts import ExploredModel, LayerPart, ModelParts, Part
from explorer.spec.request import ExplorationRequest
from explorer.spec.target import TRANSFORMERS
from workers.profiler.failures import UnsupportedTrialError
from workers.targets.target import ComponentPasses, OptimizerPart
from workers.targets.transformers.builder import PartsBuilder
from workers.targets.transformers.chosen_attention import recorded_choices
from workers.targets.transformers.config import UnsupportedModelError
from workers.targets.transformers.model import BuildSettings
from workers.targets.transformers.parts import KindFigures
from workers.targets.transformers.passes import LayerPasses, ShellPasses
from workers.targets.transformers.resolved import ResolvedModel, resolve
from workers.targets.transformers.training_run import MICRO_STEPS, TrainerOptimizer, TransformersTrainingRun

GENEROUS_SAVED_WIDTHS = 34
"""Hidden widths that a layer keeps for each token where nothing better is known (Korthikanti et al., 2022)."""
PINNED = {"cuda": ("flash", "cudnn", "efficient", "math"), "cpu": ("math",)}
"""Back ends of torch's attention that a device has more than one of."""
STOCK_EXPERTS = ("eager", "batched_mm", "grouped_mm")
NAME_IT = "a request has to name it"
SLOW_EXPERTS = ("eager", "batched_mm", "bexp_triton_grouped")
OUR_EXPERTS = ("bexp_fused", "bexp_hopper_grouped", "bexp_triton_grouped")
LOGIT_BYTES, LOGIT_TRANSIENT_BYTES = 4, 8
"""For each logit: what the library's loss keeps, and what it holds beyond that at its peak."""
_BY_OPERATION = {
    BlockRecompute.SELECTIVE: "selective",
    BlockRecompute.ACTIVATIONS: "activations",
    BlockRecompute.PROJECTIONS: "projections",
}


class TransformersTarget:
    """One job's model on one device. Everything it builds is released at the end of a context."""

    def __init__(self, request: ExplorationRequest, device: torch.device) -> None:
        """Resolve the configuration.

        Raises:
            UnsupportedTrialError: the installed library cannot build or train it; the message has its version.
        """
        assert request.hf_config is not None, "the request has a Hugging Face configuration"
        self._request = request
        self._device = device
        self._build = BuildSettings(
            precision=request.training.precision, training=request.mode == "train", seed=request.seed
        )
        try:
            self._resolved: ResolvedModel = resolve(request.hf_config, request.seq_length, settings=self._build)
        except UnsupportedModelError as error:
            raise UnsupportedTrialError(str(error)) from error
        self.version = self._resolved.config.version
        self._builder: PartsBuilder | None = None

    def report(self, hardware: HardwareSpec) -> DeviceReport:
        """Every setting is tried at micro-batch 1, after the class has passed a check of its parts.

        Raises:
            UnsupportedTrialError: the class cannot be measured by its parts.
        """
        self._check_class()
        attention = self._attention_supports()
        experts = [self._expert_support(name) for name in self._expert_names()]
        tiles = self._refusal(Settings(bta_tile=1))
        checkpointing = self._refusal(Settings(recompute="full"))
        named = set(self._request.recompute or ())
        policies = {
            name: self._refusal(Settings(recompute=name)) if name in named else "it was not asked for"
            for name in _BY_OPERATION.values()
        }
        self.rest()
        usable = [backend.name for backend in experts if backend.usable]
        default = self._resolved.model.config._experts_implementation if usable else None
        return DeviceReport(
            hardware=hardware,
            attention_backends=attention,
            expert_backends=tuple(experts),
            default_attention=self._default_attention,
            default_experts=default if default in usable else next(iter(usable), None),
            parts=self._describe(tiles, checkpointing, policies),
        )

    def rest(self) -> None:
        """The parts wait in the host's memory."""
        if self._builder is not None:
            self._builder.park()

    def check(self, candidate: Candidate, model: ExploredModel) -> None:
        """Every setting was tried before the job began; a trial tries it again at its own size."""

    @contextmanager
    def component(
        self, component: Component, model: ExploredModel, request: ExplorationRequest
    ) -> Iterator[ComponentPasses]:
        """A layer or the shell, with the component's settings."""
        builder = self._parts()
        settings = self._settings_of(component)
        passes: Any
        try:
            if component.kind is ComponentKind.SHELL:
                passes = ShellPasses(builder.shell(component.micro_batch_size), self._build, settings)
            else:
                assert component.part is not None, "a layer names its kind"
                part = builder.layer(component.part, component.micro_batch_size)
                recompute = component.recompute is BlockRecompute.FULL
                passes = LayerPasses(part, self._build, settings, recompute=recompute)
        except SettingsError as error:
            raise UnsupportedTrialError(str(error)) from error
        try:
            yield passes
        finally:
            passes.release()
            passes.restore()

    def optimizer_parts(
        self, candidate: Candidate, model: ExploredModel, request: ExplorationRequest
    ) -> Iterator[OptimizerPart]:
        """The shell's parameters, and those of one layer of each kind."""
        assert isinstance(model, ModelParts), "this target describes its model by its parts"
        yield OptimizerPart(1, self._optimizer(lambda builder: _shell_parameters(builder.shell(1))))
        for kind in model.kinds:
            yield OptimizerPart(model.layers.count(kind.name), self._optimizer(_layer_parameters(kind.name)))

    @contextmanager
    def training_run(
        self, candidate: Candidate, model: ExploredModel, request: ExplorationRequest
    ) -> Iterator[TransformersTrainingRun]:
        """The whole model, set up as `bexp.apply` does it."""
        builder = self._parts()
        whole = builder.whole()
        try:
            set_up(whole, settings_of(candidate, request))
        except SettingsError as error:
            raise UnsupportedTrialError(str(error)) from error
        whole.train(self._build.training)
        optimizer = None
        if self._build.training:
            trained = [parameter for parameter in whole.parameters() if parameter.requires_grad]
            optimizer = TrainerOptimizer(trained, request.training.optimizer.name)
        batches = [builder.batch(candidate.micro_batch_size) for _ in range(MICRO_STEPS)]
        yield TransformersTrainingRun(whole, batches, optimizer, self._build, self._device)

    # -- the report ----------------------------------------------------------------------------------------------

    @property
    def _default_attention(self) -> str:
        return self._resolved.model.config._attn_implementation or "eager"

    def _check_class(self) -> None:
        check = self._resolved.check
        if check.runs and check.by_parts and self._resolved.kinds:
            return
        reason = "; ".join(f"{name}: {why}" for name, why in check.failures.items())
        raise UnsupportedTrialError(
            f"{self._resolved.config.model_type} cannot be measured by its parts with transformers "
            f"{self.version}: {reason}"
        )

    def _attention_supports(self) -> tuple[BackendSupport, ...]:
        """The library's choice and each back end of torch that can be pinned; others are tried when named.

        A pinned back end that torch would choose anyway is the library's choice under another name, and left out.
        """
        default, asked = self._default_attention, self._request.attention_backends or ()
        with recorded_choices() as chosen:
            found = [BackendSupport(name=default, usable=True, reason=self._refusal(Settings(attention=default)))]
        same = f"sdpa:{chosen[0]}" if len(set(chosen)) == 1 else None
        if default == "sdpa":
            for backend in PINNED[self._device.type]:
                name = f"sdpa:{backend}"
                only_when_named = backend == "math" or name == same
                if only_when_named and name not in asked:
                    reason: str | None = (
                        f"sdpa takes {backend} here" if name == same else "it keeps all scores: name it to try it"
                    )
                else:
                    reason = self._refusal(Settings(attention=name))
                found.append(
                    BackendSupport(name=name, usable=reason is None, reason=reason, only_when_named=only_when_named)
                )
        others = [name for name in self._resolved.attention_implementations if name != default]
        for name in others:
            reason = self._resolved.attention_implementations[name]
            if reason is None:
                reason = self._refusal(Settings(attention=name)) if name in asked else NAME_IT
            found.append(BackendSupport(name=name, usable=reason is None, reason=reason, only_when_named=True))
        return tuple(found)

    def _expert_names(self) -> list[str]:
        known = self._resolved.experts_implementations
        if not known:
            return []
        return [*STOCK_EXPERTS, *(OUR_EXPERTS if self._device.type == "cuda" else ())]

    def _expert_support(self, name: str) -> BackendSupport:
        """Loops over experts, and products that gather every token's weights, are tried when they are named."""
        only_when_named = self._device.type == "cuda" and name in SLOW_EXPERTS
        reason = self._resolved.experts_implementations.get(name)
        if reason is None and only_when_named and name not in (self._request.expert_backends or ()):
            reason = NAME_IT
        if reason is None:
            reason = self._refusal(Settings(experts=name))
        stock = name in STOCK_EXPERTS
        return BackendSupport(
            name=name, usable=reason is None, reason=reason, stock=stock, only_when_named=only_when_named
        )

    def _refusal(self, settings: Settings) -> str | None:
        """Why a setting cannot be had here, found by running a layer of each kind with it; null if it can."""
        builder = self._parts()
        for kind in dict.fromkeys(self._resolved.kinds):
            part = builder.layer(kind, 1)
            if settings.experts is not None and not _has_experts(part.module):
                continue
            try:
                passes = LayerPasses(part, self._build, settings, recompute=False)
                try:
                    passes.prepare_forward()
                    passes.forward()
                    if self._build.training:
                        passes.prepare_backward()
                        passes.backward()
                finally:
                    passes.release()
                    passes.restore()
            except (SettingsError, RuntimeError, ValueError, ImportError, NotImplementedError, TypeError) as error:
                text = " ".join(str(error).split()) or type(error).__name__
                return text[:300]
        return None

    def _describe(
        self, tiles: str | None, checkpointing: str | None, by_operation: dict[str, str | None]
    ) -> ModelParts:
        resolved = self._resolved
        figures = resolved.kind_figures
        experts = {id(layer): _has_experts(layer) for layer in resolved.layers}
        kinds = [self._layer_part(each, has_experts=experts[id(resolved.layers[each.indices[0]])]) for each in figures]
        parameters = list({id(p): p for p in resolved.model.parameters()}.values())
        sizes = [p.numel() * p.element_size() for p in parameters]
        trained = [size for size, p in zip(sizes, parameters, strict=True) if p.requires_grad]
        policies = [Recompute.NONE]
        if checkpointing is None:
            policies += [policy for policy in Recompute if policy.layer_share > 0]
        policies += [Recompute(name) for name, reason in by_operation.items() if reason is None]
        refused = {"tiles": tiles, "checkpointing": checkpointing, **by_operation}
        return ModelParts(
            target=TRANSFORMERS,
            target_version=self.version,
            name=resolved.config.model_type,
            dtype=DType.BFLOAT16,
            seq_length=resolved.config.seq_length,
            layers=resolved.kinds,
            kinds=tuple(kinds),
            shell=self._shell_part(figures[0].hidden_bytes_per_token),
            output_bytes_per_token=figures[0].hidden_bytes_per_token,
            num_parameters=sum(p.numel() for p in parameters),
            parameter_bytes=sum(sizes),
            trainable_bytes=sum(trained),
            largest_trainable_bytes=max(trained, default=0),
            policies=tuple(policies),
            tiles=tiles is None,
            unavailable={name: reason for name, reason in refused.items() if reason is not None},
        )

    def _layer_part(self, figures: KindFigures, *, has_experts: bool) -> LayerPart:
        saved = figures.saved_bytes_per_token or GENEROUS_SAVED_WIDTHS * figures.hidden_bytes_per_token
        share = figures.num_trainable_parameters / max(1, figures.num_parameters)
        return LayerPart(
            name=figures.name,
            description=f"{figures.class_name}, {len(figures.indices)} times",
            has_experts=has_experts,
            num_parameters=figures.num_parameters,
            parameter_bytes=figures.parameter_bytes,
            trainable_bytes=round(share * figures.parameter_bytes),
            flops_per_token=figures.flops_per_token,
            flops_per_sequence=figures.attention_flops_per_token * self._request.seq_length,
            saved_bytes_per_token=saved,
            transient_bytes_per_token=saved / 2,
        )

    def _shell_part(self, hidden_bytes_per_token: int) -> Part:
        figures = self._resolved.shell_figures
        share = figures.num_trainable_parameters / max(1, figures.num_parameters)
        return Part(
            num_parameters=figures.num_parameters,
            parameter_bytes=figures.parameter_bytes,
            trainable_bytes=round(share * figures.parameter_bytes),
            flops_per_token=figures.flops_per_token,
            saved_bytes_per_token=LOGIT_BYTES * figures.vocab_size + 4 * hidden_bytes_per_token,
            transient_bytes_per_token=LOGIT_TRANSIENT_BYTES * figures.vocab_size,
        )

    # -- building ------------------------------------------------------------------------------------------------

    def _parts(self) -> PartsBuilder:
        if self._builder is None:
            self._builder = self._resolved.builder(self._device)
        return self._builder

    def _settings_of(self, component: Component) -> Settings:
        if component.kind is ComponentKind.SHELL:
            return Settings(loss="chunked" if component.backend == "chunked" else "library")
        assert component.backend is not None, "a layer names its attention"
        attention, _, experts = component.backend.partition("+")
        return Settings(
            attention=attention,
            experts=experts or None,
            recompute=_BY_OPERATION.get(component.recompute, "none"),
            bta_tile=component.bta_tile,
            compile=self._request.execution == "compile",
        )

    def _optimizer(self, parameters: Callable[[PartsBuilder], list[nn.Parameter]]) -> Callable[[], TrainerOptimizer]:
        def build() -> TrainerOptimizer:
            found = [p for p in parameters(self._parts()) if p.requires_grad]
            for parameter in found:
                parameter.grad = torch.zeros_like(parameter)
            return TrainerOptimizer(found, self._request.training.optimizer.name, keeps_gradients=True)

        return build


def settings_of(candidate: Candidate, request: ExplorationRequest) -> Settings:
    """What a candidate sets on a whole model."""
    return Settings(
        attention=candidate.attention_backend,
        experts=candidate.expert_backend,
        recompute=candidate.recompute.value,
        bta_tile=candidate.bta_tile,
        loss="chunked" if candidate.loss == "chunked" else "library",
        compile=request.execution == "compile",
        allocator=request.allocator,
    )


def _has_experts(layer: nn.Module) -> bool:
    from bexp.transformers.experts import expert_modules  # noqa: PLC0415 - needs transformers

    return bool(expert_modules(layer))


def _layer_parameters(kind: str) -> Callable[[PartsBuilder], list[nn.Parameter]]:
    return lambda builder: list(builder.layer(kind, 1).module.parameters())


def _shell_parameters(part: Any) -> list[nn.Parameter]:
    inside = {id(p) for layer in part.skeleton.layers for p in layer.parameters()}
    return [p for p in part.model.parameters() if id(p) not in inside]
