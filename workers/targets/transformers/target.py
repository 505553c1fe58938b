"""The target `transformers`: the classes of the installed library, measured by their parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.request_texts import text_batches
from bexp.explorer.cost.text_batches import TextBatch
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.hardware import NAME_IT, HardwareSpec
from bexp.explorer.model.lengths import PACKED
from bexp.explorer.model.model import DType
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.model.routing import RoutingSpec
from bexp.explorer.model.spelling import shortened
from bexp.explorer.model.target import TRANSFORMERS
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.kernels.builds import Experts
from bexp.kernels.shapes import ExpertsShape
from bexp.out_of_memory import is_out_of_memory
from bexp.trainer.muon_optimizer import outer_modules
from bexp.transformers.experts import OURS, kernel_shapes
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings, SettingsError
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.targets.target import ComponentPasses, Miniature, OptimizerPart
from bexp.workers.targets.transformers.batch import arranged, make_batch
from bexp.workers.targets.transformers.builder import PartsBuilder
from bexp.workers.targets.transformers.config import OWN_CLASS, ResolvedConfig, UnsupportedModelError
from bexp.workers.targets.transformers.model import BuildSettings, build_by_layers, build_model
from bexp.workers.targets.transformers.packing import LEAK
from bexp.workers.targets.transformers.parts import (
    PartWeights,
    WeightsByKind,
    add_up,
    count_experts,
    count_quantized,
    num_bytes,
)
from bexp.workers.targets.transformers.passes import (
    BY_OPERATION,
    WHOLE_LAYER,
    LayerPasses,
    ShellPasses,
    float8_of,
    full_host,
    require_host_memory,
    settings_of,
    settings_of_component,
)
from bexp.workers.targets.transformers.probe import SettingsProbe
from bexp.workers.targets.transformers.quantized import adapted_weights, add_adapters, require_library
from bexp.workers.targets.transformers.resolved import ResolvedModel, resolve
from bexp.workers.targets.transformers.results import compare_float8
from bexp.workers.targets.transformers.shrink import num_layers_for
from bexp.workers.targets.transformers.training_run import (
    TrainerOptimizer,
    TransformersTrainingRun,
)
from bexp.workers.training.data_parallel import (
    DATA_PARALLEL_MICRO_STEPS,
    MICRO_STEPS,
    LoneReplica,
    data_parallel,
)

BUILT_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""The micro-batch sizes that kernels are built for. Few kernels differ between neighbours."""


class TransformersTarget:
    """One job's model on one device. All parts that it builds are released at the end of a context."""

    def __init__(self, request: ExplorationRequest, instruments: Instruments) -> None:
        """Resolve the configuration.

        Raises:
            UnsupportedTrialError: the installed library cannot build or train it; the message has its version.
        """
        assert request.hf_config is not None, "the request has a Hugging Face configuration"
        _refuse_what_is_not_measured(request)
        self._request = request
        self._instruments = instruments
        self._device = instruments.device
        lora, quantization = request.training.lora, request.quantized
        self._build = BuildSettings(
            precision=request.training.precision,
            training=request.mode == "train",
            seed=request.seed,
            prepare=None if lora is None else partial(add_adapters, spec=lora, is_quantized=quantization is not None),
            mixed=lora is not None,
            quantization=quantization,
        )
        try:
            if quantization is not None:
                require_library(quantization)
            self._resolved: ResolvedModel = _resolved(json.dumps(request.hf_config), request.seq_length, self._build)
        except UnsupportedModelError as error:
            raise UnsupportedTrialError(str(error)) from error
        self.version = self._resolved.config.version
        self._builder: PartsBuilder | None = None

    def report(self, hardware: HardwareSpec) -> DeviceReport:
        """Try every setting at micro-batch 1, after the class has passed a check of its parts.

        Raises:
            UnsupportedTrialError: the class cannot be measured by its parts.
        """
        self._order_kernels()
        self._check_class()
        quantization = self._build.quantization
        weights = None if quantization is None else count_quantized(self._parts(), quantization)
        recipe = float8_of(self._request)
        float8 = None if recipe is None else compare_float8(self._parts(), recipe)
        probe = SettingsProbe(self._resolved, self._parts(), self._request)
        attention = probe.attention_supports()
        if self._request.batching in PACKED and not any(one.usable for one in attention):
            leaks = [one for one in attention if LEAK in (one.reason or "")] or attention
            reasons = "; ".join(f"{one.name}: {one.reason}" for one in leaks)
            raise UnsupportedTrialError(f"{self._resolved.config.model_type} cannot train on packed texts: {reasons}")
        choices = probe.choice_supports()
        if self._instruments.kernels is not None:
            self._instruments.kernels.wait()
        experts = probe.expert_supports()
        named, checkpointing = set(self._request.recompute or ()), probe.layer_recompute_refusal()
        parts = describe_parts(
            self._resolved,
            tiles=probe.refusal(Settings(bta_tile=1)),
            checkpointing=checkpointing,
            named={
                **{
                    name: probe.refusal(Settings(recompute=name)) if name in named else NAME_IT
                    for name in BY_OPERATION.values()
                    if name != Recompute.OFFLOAD
                },
                Recompute.OFFLOAD: probe.offload_refusal(),
                **{
                    policy.value: checkpointing or self._resolved.group_problem
                    for policy in named
                    if policy.group_size is not None
                },
            },
        )
        parts = parts.model_copy(update={"float8": float8})
        if weights is not None:
            parts = with_quantized_weights(parts, weights)
        if self._request.training.optimizer.of_library is not None and self._request.mode == "train":
            name, made = self._request.training.optimizer.name, self._optimizer_parts(parts, self._request)
            parts = with_optimizer_state(parts, name, made)
        self.rest()
        usable = [backend.name for backend in experts if backend.usable]
        default = self._resolved.model.config._experts_implementation if usable else None
        return DeviceReport(
            hardware=hardware,
            attention_backends=attention,
            expert_backends=experts,
            choices=choices,
            default_attention=probe.default_attention,
            default_experts=default if default in usable else next(iter(usable), None),
            parts=parts,
        )

    def rest(self) -> int:
        """Return the bytes of the parts' weights, which stay on the device."""
        return 0 if self._builder is None else self._builder.rest()

    def check(self, candidate: Candidate, model: ExploredModel) -> None:
        """Do nothing: every setting was tried before the job began, and a trial tries it again at its own size."""

    @contextmanager
    def component(
        self,
        component: Component,
        model: ExploredModel,
        request: ExplorationRequest,
        batch: TextBatch | None = None,
    ) -> Iterator[ComponentPasses]:
        """Build a layer or the shell, with the component's settings."""
        builder = self._parts()
        settings = settings_of_component(component, self._request)
        if settings.compile:
            torch.compiler.reset()  # code of another size would make this one's sizes dynamic, and slower
        passes: Any
        texts = (
            component.micro_batch_size
            if batch is None
            else arranged(batch, settings.attention, flattens=request.flattens)
        )
        try:
            if component.kind is ComponentKind.SHELL:
                passes = ShellPasses(builder.shell(texts), self._build, settings)
            else:
                assert component.part is not None, "a layer names its kind"
                part = builder.layer(component.part, texts)
                passes = LayerPasses(part, self._build, settings, recompute=WHOLE_LAYER.get(component.recompute))
        except SettingsError as error:
            raise UnsupportedTrialError(str(error)) from error
        try:
            if settings.policy is Recompute.OFFLOAD:
                require_host_memory(passes, component, model)
            yield passes
        finally:
            passes.release()
            passes.restore()

    def optimizer_parts(
        self, candidate: Candidate, model: ExploredModel, request: ExplorationRequest
    ) -> Iterator[OptimizerPart]:
        """Yield the trained parameters of the shell, and those of one layer of each kind."""
        assert isinstance(model, ModelParts), "this target describes its model by its parts"
        return self._optimizer_parts(model, request)

    def _optimizer_parts(self, model: ModelParts, request: ExplorationRequest) -> Iterator[OptimizerPart]:
        # With master weights all gradients are converted before a step. The others keep temporaries of all parameters.
        at_once = self._device.type == "cuda" and request.training.optimizer.name in ("adagrad", "rmsprop")
        adds_up = self._build.keeps_master_weights or at_once
        if model.shell.trainable_bytes:
            shell = self._optimizer(request, lambda builder: _shell_parameters(builder.shell(1)), of_shell=True)
            yield OptimizerPart(1, shell, adds_up=adds_up)
        for kind in (kind for kind in model.kinds if kind.trainable_bytes):
            layer = self._optimizer(request, _layer_parameters(kind.name))
            yield OptimizerPart(model.layers.count(kind.name), layer, adds_up=adds_up)

    @contextmanager
    def training_run(
        self, candidate: Candidate, model: ExploredModel, request: ExplorationRequest
    ) -> Iterator[TransformersTrainingRun]:
        """Build the whole model, set up as by `bexp.apply`."""
        self._parts().release()
        self._instruments.settle(release=True)  # else the peak and the reserved memory include that of the parts
        settings, size = settings_of(candidate, request), candidate.micro_batch_size
        batches = text_batches(request, size)
        if settings.compile:
            torch.compiler.reset()  # as above
        # The first micro-batch is not timed, because the optimizer may still run at the same time.
        texts = [TextBatch.whole(size, request.seq_length)] if batches is None else list(batches.measured)
        texts = texts if batches is None else [texts[0], *texts]
        with self._train(self._resolved.config, settings, texts, request, together=True) as run:
            yield run

    @contextmanager
    def miniature(self, model: ExploredModel, request: ExplorationRequest, *, together: bool) -> Iterator[Miniature]:
        """Build a model of the self-check's configuration."""
        tiny = self._resolved.tiny
        texts = [TextBatch.whole(1, tiny.seq_length)]
        with self._train(tiny, Settings(), texts, request, together=together) as run:
            yield Miniature(run, 1 + num_layers_for(self._resolved.kinds))

    def _order_kernels(self) -> None:
        """Have our expert kernels built for each size, if the request may choose one of them."""
        asked = self._request.expert_backends or OURS
        if self._instruments.kernels is None or not set(asked) & set(OURS):
            return
        shapes = set[tuple[ExpertsShape, bool]]()
        for layer in self._resolved.layers:
            shapes |= kernel_shapes(layer, count_experts(self._resolved.config.text_config)[1])
        sizes = tuple(size * self._request.seq_length for size in BUILT_SIZES)
        self._instruments.kernels.order(
            [Experts(shape, sizes, transposed) for shape, transposed in sorted(shapes, key=repr)]
        )

    def _check_class(self) -> None:
        check = self._resolved.check
        if check.runs and check.by_parts and self._resolved.kinds:
            is_padded = self._request.lengths is not None and self._request.batching not in PACKED
            padded = check.failures.get("padded_text") if is_padded else None
            if padded is None:
                return
            raise UnsupportedTrialError(
                f"{self._resolved.config.model_type} cannot be measured with padded batches in transformers "
                f"{self.version}: {padded}"
            )
        reason = "; ".join(f"{name}: {why}" for name, why in check.failures.items())
        raise UnsupportedTrialError(
            f"{self._resolved.config.model_type} cannot be measured by its parts with transformers "
            f"{self.version}: {reason}{OWN_CLASS if check.runs else ''}"
        )

    # -- building ------------------------------------------------------------------------------------------------

    @contextmanager
    def _train(
        self,
        config: ResolvedConfig,
        settings: Settings,
        texts: Sequence[TextBatch],
        request: ExplorationRequest,
        *,
        together: bool,
    ) -> Iterator[TransformersTrainingRun]:
        """A whole model in training, with the same micro-batches in each step. The ranks have different data.

        What setting it up has changed beside the model, such as a rotation of all models of the class, is undone.
        """
        group, dtype = self._instruments.rank_group, self._build.parameter_dtype
        is_data_parallel = together and self._build.training and group.size > 1
        sharding = request.training.sharding
        members = group.members if is_data_parallel else None
        parallel = data_parallel(members, self._device, sharding, dtype, dtype, drops_gradients=True)
        if together and group.size == 1 and request.devices.hold_buckets:
            parallel = LoneReplica()
        seed, flattens = self._build.seed + group.rank, request.flattens
        rows = [arranged(one, settings.attention, flattens=flattens) for one in texts]
        made = [make_batch(config.config, one, self._device, seed=seed) for one in rows]
        batches = made * (DATA_PARALLEL_MICRO_STEPS if is_data_parallel else MICRO_STEPS) if len(made) == 1 else made
        name, awaits = request.training.optimizer.name, request.runner.awaits_losses
        with ExitStack() as changes:
            try:
                if is_data_parallel and sharding is not Sharding.NONE:
                    model = build_by_layers(config, self._build, self._device, partial(parallel.take, is_last=False))
                elif self._build.quantization is not None:  # the plain weights of all layers may not fit at once
                    model = build_by_layers(config, self._build, self._device, lambda _: None)
                else:
                    model = build_model(config, self._build, self._device)
                changes.callback(set_up(model, settings).undo)
            except (SettingsError, UnsupportedModelError) as error:
                raise UnsupportedTrialError(str(error)) from error
            yield TransformersTrainingRun(
                model, batches, name, self._build, self._device, parallel, awaits_losses=awaits
            )

    def _parts(self) -> PartsBuilder:
        if self._builder is None:
            self._builder = self._resolved.builder(self._device)
        return self._builder

    def _optimizer(
        self,
        request: ExplorationRequest,
        parameters: Callable[[PartsBuilder], list[nn.Parameter]],
        *,
        of_shell: bool = False,
    ) -> Callable[[], TrainerOptimizer]:
        """An optimizer of a device's share of the parameters."""
        shards = request.devices.optimizer_shards

        def build() -> TrainerOptimizer:
            trained = [p for p in parameters(self._parts()) if p.requires_grad]
            if shards > 1:
                trained = [nn.Parameter(p.detach().flatten()[: -(-p.numel() // shards)].clone()) for p in trained]
            known = self._request.training.optimizer.of_library
            if known is not None and known.is_on_host:  # its hooks stay on its parameters
                trained = [nn.Parameter(p.detach().clone()) for p in trained]
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            name, master = self._request.training.optimizer.name, self._build.keeps_master_weights
            outer = outer_modules(self._parts().shell(1).model) if of_shell else ()
            return TrainerOptimizer(trained, name, master_weights=master, keeps_gradients=True, outer=outer)

        return build


@lru_cache(maxsize=2)
def _resolved(config: str, seq_length: int, build: BuildSettings) -> ResolvedModel:
    """The model of a configuration in JSON, cached because the next job often has the same and checks take seconds."""
    return resolve(json.loads(config), seq_length, settings=build)


def _layer_parameters(kind: str) -> Callable[[PartsBuilder], list[nn.Parameter]]:
    return lambda builder: list(builder.layer(kind, 1).module.parameters())


def _shell_parameters(part: Any) -> list[nn.Parameter]:
    inside = {id(p) for layer in part.skeleton.layers for p in layer.parameters()}
    return [p for p in part.model.parameters() if id(p) not in inside]


def _refuse_what_is_not_measured(request: ExplorationRequest) -> None:
    """Raise UnsupportedTrialError for parts of a request that this target would leave out in silence."""
    sharded = request.mode == "train" and request.space.highest_sharding is not Sharding.NONE
    if sharded and request.training.precision == "autocast":
        raise UnsupportedTrialError(
            "sharded training is measured with precision 'pure': with float32 parameters, trainers gather another "
            "format than they keep"
        )
    if request.routing != RoutingSpec():
        raise UnsupportedTrialError("a routing is drawn with target 'bexp' only: here the model's own routers decide")
    if max(request.devices.context_parallel_sizes) > 1:
        raise UnsupportedTrialError("context parallelism is measured with target 'bexp' only")


def describe_parts(
    resolved: ResolvedModel, *, tiles: str | None, checkpointing: str | None, named: Mapping[str, str | None]
) -> ModelParts:
    """Return the parts of a model. The arguments say why it has no tiles, checkpoints, or policies by name."""
    parameters = list({id(p): p for p in resolved.model.parameters()}.values())
    policies = [Recompute.NONE]
    if checkpointing is None:
        policies += [policy for policy in Recompute if policy.layer_share > 0]
    policies += [Recompute(name) for name, reason in named.items() if reason is None]
    refused = {"tiles": tiles, "checkpointing": checkpointing, **named}
    return ModelParts(
        target=TRANSFORMERS,
        target_version=resolved.config.version,
        name=resolved.config.model_type,
        class_name=resolved.config.model_class.__name__,
        dtype=DType.BFLOAT16,
        seq_length=resolved.config.seq_length,
        layers=resolved.kinds,
        kinds=resolved.layer_parts,
        shell=resolved.shell_part,
        output_bytes_per_token=resolved.hidden_bytes_per_token,
        logits_per_token=int(resolved.config.text_config.vocab_size),
        num_parameters=sum(p.numel() for p in parameters),
        parameter_bytes=num_bytes(parameters),
        trainable_bytes=num_bytes(p for p in parameters if p.requires_grad),
        adapted=adapted_weights(resolved.model),
        policies=tuple(policies),
        tiles=tiles is None,
        unavailable={name: reason for name, reason in refused.items() if reason is not None},
    )


def with_quantized_weights(parts: ModelParts, found: PartWeights) -> ModelParts:
    """Return the parts with the bytes that quantised weights really have."""
    kinds = [kind.model_copy(update={"parameter_bytes": _total(found.layers[kind.name])}) for kind in parts.kinds]
    weights = add_up([(1, found.shell), *((parts.layers.count(name), layer) for name, layer in found.layers.items())])
    return parts.model_copy(
        update={
            "kinds": tuple(kinds),
            "shell": parts.shell.model_copy(update={"parameter_bytes": _total(found.shell)}),
            "parameter_bytes": sum(one.num_bytes for one in weights),
            "weights": weights,
        }
    )


def _total(weights: WeightsByKind) -> int:
    return sum(one.num_bytes for one in weights.values())


def with_optimizer_state(parts: ModelParts, name: str, optimizers: Iterable[OptimizerPart]) -> ModelParts:
    """Return a model's parts with the bytes after a step of each of `optimizers`, as often as the model has it.

    Raises:
        UnsupportedTrialError: the optimizer does not work here, or the host cannot hold its state.
    """
    on_device = on_host = 0
    for part in optimizers:
        try:
            optimizer = part.build()
            assert isinstance(optimizer, TrainerOptimizer), "this target makes no other"
            with torch.compiler.set_stance("force_eager"):  # compiled code has the same state, after seconds
                optimizer.step()
        except Exception as error:  # a library that is broken in any way
            if isinstance(error, UnsupportedTrialError) or is_out_of_memory(error):
                raise
            short = shortened(" ".join(str(error).split()), 200) or type(error).__name__
            raise UnsupportedTrialError(f"optimizer '{name}' does not work here: {short}") from error
        on_device += part.count * optimizer.state_bytes
        on_host += part.count * optimizer.host_bytes
        for parameter in optimizer.parameters:
            parameter.grad = None
    if on_host and (reason := full_host(on_host, f"optimizer '{name}' needs")) is not None:
        raise UnsupportedTrialError(reason)
    return parts.model_copy(update={"optimizer_state_bytes": on_device, "optimizer_host_bytes": on_host or None})
