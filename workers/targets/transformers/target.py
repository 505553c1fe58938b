"""The target `transformers`: the classes of the installed library, measured by their parts."""

from __future__ import annotations

import gc
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
from workers.targets.transformers.config import UnsupportedModelError
from workers.targets.transformers.model import BuildSettings
from workers.targets.transformers.parts import KindFigures
from workers.targets.transformers.passes import LayerPasses, ShellPasses
from workers.targets.transformers.resolved import ResolvedModel, resolve
from workers.targets.transformers.training_run import MICRO_STEPS, TrainerOptimizer, TransformersTrainingRun

PROBE_LENGTH = 128
"""Tokens of the sequence on which settings are tried before a job."""
GENEROUS_SAVED_WIDTHS = 34
"""Hidden widths that a layer keeps for each token where nothing better is known (Korthikanti et al., 2022)."""
PINNED = {"cuda": ("flash", "cudnn", "efficient", "math"), "cpu": ("math",)}
"""Back ends of torch's attention that a device has more than one of."""
STOCK_EXPERTS = ("eager", "batched_mm", "grouped_mm")
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
            check = self._resolved.check
        except UnsupportedModelError as error:
            raise UnsupportedTrialError(str(error)) from error
        self.version = self._resolved.config.version
        if not check.runs or not check.by_parts or not self._resolved.kinds:
            reason = "; ".join(f"{name}: {why}" for name, why in check.failures.items())
            raise UnsupportedTrialError(
                f"{self._resolved.config.model_type} cannot be measured by its parts with transformers "
                f"{self.version}: {reason}"
            )
        self._builder: PartsBuilder | None = None
        self._refused: dict[str, str | None] = {}

    def report(self, hardware: HardwareSpec) -> DeviceReport:
        """Every setting is tried on a short sequence."""
        with self._probe() as refusal:
            attention = [self._attention_support(name, refusal) for name in self._attention_names()]
            experts = [self._expert_support(name, refusal) for name in self._expert_names()]
            tiles = refusal(Settings(bta_tile=1))
            checkpointing = refusal(Settings(recompute="full"))
            policies = {name: refusal(Settings(recompute=name)) for name in _BY_OPERATION.values()}
        usable = [backend.name for backend in experts if backend.usable]
        default = self._resolved.model.config._experts_implementation if usable else None
        return DeviceReport(
            hardware=hardware,
            attention_backends=tuple(attention),
            expert_backends=tuple(experts),
            default_attention=self._default_attention,
            default_experts=default if default in usable else next(iter(usable), None),
            parts=self._describe(tiles, checkpointing, policies),
        )

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
        self._builder = None
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

    def _attention_names(self) -> list[str]:
        """The library's choice, each back end of torch that can be pinned, and what is tried when it is named."""
        names = [self._default_attention]
        if self._default_attention == "sdpa":
            names += [f"sdpa:{name}" for name in PINNED[self._device.type]]
        installed = [name for name, why in self._resolved.attention_implementations.items() if why is None]
        return list(dict.fromkeys([*names, *installed]))

    def _attention_support(self, name: str, refusal: Callable[[Settings], str | None]) -> BackendSupport:
        reason = refusal(Settings(attention=name))
        named = name != self._default_attention and (not name.startswith("sdpa:") or name == "sdpa:math")
        return BackendSupport(name=name, usable=reason is None, reason=reason, only_when_named=named)

    def _expert_names(self) -> list[str]:
        known = self._resolved.experts_implementations
        return [*STOCK_EXPERTS, *OUR_EXPERTS] if known else []

    def _expert_support(self, name: str, refusal: Callable[[Settings], str | None]) -> BackendSupport:
        reason = self._resolved.experts_implementations.get(name) or refusal(Settings(experts=name))
        stock = name in STOCK_EXPERTS
        return BackendSupport(name=name, usable=reason is None, reason=reason, stock=stock)

    @contextmanager
    def _probe(self) -> Iterator[Callable[[Settings], str | None]]:
        """What says why a setting cannot be had, by running every kind of layer on a short sequence."""
        short = resolve(
            self._request.hf_config or {}, min(PROBE_LENGTH, self._request.seq_length), settings=self._build
        )
        builder = short.builder(self._device)
        kinds = list(dict.fromkeys(short.kinds))

        def refusal(settings: Settings) -> str | None:
            for kind in kinds:
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
                except torch.OutOfMemoryError:
                    raise
                except (SettingsError, RuntimeError, ValueError, ImportError, NotImplementedError, TypeError) as error:
                    return f"{type(error).__name__}: {str(error).splitlines()[0][:300]}" if str(error) else repr(error)
            return None

        try:
            yield refusal
        finally:
            builder.release()
            gc.collect()

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
            class_name=resolved.config.model_class.__name__,
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
