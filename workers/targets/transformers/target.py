"""The target `transformers`: the classes of the installed library, measured by their parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings, SettingsError
from explorer.cost_model.components import BlockRecompute, Component, ComponentKind
from explorer.spec.candidate import Candidate
from explorer.spec.hardware import DeviceReport, HardwareSpec
from explorer.spec.parts import ExploredModel, ModelParts
from explorer.spec.request import ExplorationRequest
from explorer.spec.training import Sharding
from workers.profiler.failures import UnsupportedTrialError
from workers.targets.target import ComponentPasses, OptimizerPart
from workers.targets.transformers.builder import PartsBuilder
from workers.targets.transformers.config import UnsupportedModelError
from workers.targets.transformers.describe import describe_parts
from workers.targets.transformers.model import BuildSettings
from workers.targets.transformers.passes import LayerPasses, ShellPasses
from workers.targets.transformers.probe import NAME_IT, SettingsProbe
from workers.targets.transformers.resolved import ResolvedModel, resolve
from workers.targets.transformers.training_run import MICRO_STEPS, TrainerOptimizer, TransformersTrainingRun

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
        _refuse_what_is_not_measured(request)
        self._request = request
        self._device = device
        self._build = BuildSettings(
            precision=request.training.precision, training=request.mode == "train", seed=request.seed
        )
        try:
            self._resolved: ResolvedModel = _resolved(json.dumps(request.hf_config), request.seq_length, self._build)
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
        probe = SettingsProbe(self._resolved, self._parts(), self._request)
        attention, experts = probe.attention_supports(), probe.expert_supports()
        named = set(self._request.recompute or ())
        parts = describe_parts(
            self._resolved,
            tiles=probe.refusal(Settings(bta_tile=1)),
            checkpointing=probe.refusal(Settings(recompute="full")),
            by_operation={
                name: probe.refusal(Settings(recompute=name)) if name in named else NAME_IT
                for name in _BY_OPERATION.values()
            },
        )
        self.rest()
        usable = [backend.name for backend in experts if backend.usable]
        default = self._resolved.model.config._experts_implementation if usable else None
        return DeviceReport(
            hardware=hardware,
            attention_backends=attention,
            expert_backends=experts,
            default_attention=probe.default_attention,
            default_experts=default if default in usable else next(iter(usable), None),
            parts=parts,
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

    def _check_class(self) -> None:
        check = self._resolved.check
        if check.runs and check.by_parts and self._resolved.kinds:
            return
        reason = "; ".join(f"{name}: {why}" for name, why in check.failures.items())
        raise UnsupportedTrialError(
            f"{self._resolved.config.model_type} cannot be measured by its parts with transformers "
            f"{self.version}: {reason}"
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


@lru_cache(maxsize=2)
def _resolved(config: str, seq_length: int, build: BuildSettings) -> ResolvedModel:
    """The model of a configuration in JSON. The next job often asks about the same one, and a check takes seconds."""
    return resolve(json.loads(config), seq_length, settings=build)


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


def _layer_parameters(kind: str) -> Callable[[PartsBuilder], list[nn.Parameter]]:
    return lambda builder: list(builder.layer(kind, 1).module.parameters())


def _shell_parameters(part: Any) -> list[nn.Parameter]:
    inside = {id(p) for layer in part.skeleton.layers for p in layer.parameters()}
    return [p for p in part.model.parameters() if id(p) not in inside]


def _refuse_what_is_not_measured(request: ExplorationRequest) -> None:
    """Raise UnsupportedTrialError for what a request asks for and this target would leave out in silence."""
    if request.training.lora is not None:
        raise UnsupportedTrialError("LoRA adapters are not measured yet; leave out training.lora")
    if request.mode == "train" and request.highest_sharding is not Sharding.NONE:
        raise UnsupportedTrialError("sharded training is measured with target 'bexp' only; leave out training.sharding")
    if max(request.context_parallel_sizes) > 1:
        raise UnsupportedTrialError("context parallelism is measured with target 'bexp' only")
