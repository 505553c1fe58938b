"""A recommendation as the trainer's process reads it: from `bexp best ID --json`, from REST, or from `bexp.explore`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from bexp.explorer.dimensions.attention import TORCH_KERNELS
from bexp.explorer.dimensions.candidate import CHOICES
from bexp.explorer.dimensions.context_parallel import ALONE, Sharing
from bexp.explorer.dimensions.execution import EXECUTION
from bexp.explorer.dimensions.experts import LIBRARY_EXPERTS, OUR_EXPERTS, library_experts
from bexp.explorer.dimensions.loss import LOSS
from bexp.explorer.model.model import EXPERT_COUNTS
from bexp.explorer.model.optimizers import LIBRARY
from bexp.explorer.model.quantization import quantization_of
from bexp.explorer.model.target import OWN_ATTENTION
from bexp.step.results import StepRecommendation
from bexp.transformers.settings import Float8, Settings

Source = str | Path | Mapping[str, Any] | StepRecommendation

_SIZES = {
    "model_type": ("model_type",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_layers", "num_hidden_layers", "n_layer"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "vocab_size": ("vocab_size",),
    "num_experts": EXPERT_COUNTS,
}
"""The sizes by which architectures are compared, and their names in configurations."""


_HOW_TO_WRITE = "`bexp best ID --json > best.json` writes one"


class RecommendationError(ValueError):
    """The recommendation cannot be read, or is for another model; the message says which."""


@dataclass(frozen=True)
class RecommendedSetup:
    """The part of a recommendation that a trainer needs.

    It is the candidate that divides the requested batch, where the document names one, so that accumulation keeps the
    batch; else the recommended candidate. That of an exploration without a batch names none.

    `architecture` holds the sizes of the model that was measured. `effective_batch_size` is the number of sequences in
    a whole step on all devices. Measured figures are those of one device; unknown ones are None. `own_code`
    says that the step of a target of the person's own was measured, which has settings of its own. `dtype` is the
    format of the weights, and `autocast` that of the computation under autocast; None: without autocast.
    `master_weights` says that the optimizer kept a float32 copy of the weights. `lora` are the adapters that were
    trained in place of the weights, and `bits` those of quantised weights. `optimizer` (`adamw`, `sgd`) is None if the
    document does not say how the model was trained; then nothing is known of the adapters either. `batching` is `full`,
    or that of a request whose texts have unequal lengths; a sequence then has `tokens_per_sequence` in the mean,
    without padding.
    `library_code` says that the library's own classes were measured. `sharing` says how devices shared each sequence.
    """

    settings: Settings
    micro_batch_size: int
    effective_batch_size: int | None = None
    seq_length: int | None = None
    dtype: str | None = None
    autocast: str | None = None
    master_weights: bool = False
    lora: Mapping[str, Any] | None = None
    bits: int | None = None
    optimizer: str | None = None
    batching: str | None = None
    tokens_per_sequence: float | None = None
    confidence: int | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    exploration_id: str | None = None
    device_name: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    architecture: Mapping[str, Any] = field(default_factory=dict)
    own_code: bool = False
    library_code: bool = False
    sharing: Sharing = ALONE

    @classmethod
    def read(cls, source: Source | RecommendedSetup) -> RecommendedSetup:
        """Read a path, a JSON text or object, what `bexp.explore` returns, or a recommendation that was read before.

        Raises RecommendationError if it is not a recommendation, or if nothing is recommended.
        """
        if isinstance(source, RecommendedSetup):
            return source
        document = _document(source)
        recommendation = document.get("recommendation", document)
        if not isinstance(recommendation, Mapping):
            raise RecommendationError("it recommends nothing (yet)")
        recommendation = _dividing(recommendation)
        mesh = (recommendation.get("plan") or {}).get("mesh") or {}
        if any(mesh.get(size, 1) > 1 for size in ("tensor", "pipeline", "expert")):
            raise RecommendationError(
                "a mesh of devices is for a trainer that builds it: export the answer for megatron or torchtitan"
            )
        candidate = recommendation.get("candidate")
        if not isinstance(candidate, Mapping) or not isinstance(candidate.get("micro_batch_size"), int):
            raise RecommendationError("this is not a recommendation: it names no micro_batch_size")
        if candidate.get("capacity_factor") is not None:
            raise RecommendationError(
                "a capacity factor is for a trainer whose experts drop tokens: export the answer for megatron"
            )
        request = _request(document)
        try:
            settings = _settings(recommendation, candidate, request)
        except (ValueError, TypeError) as error:
            raise RecommendationError(f"this recommendation cannot be applied: {error}") from error
        own_code = candidate.get("attention_backend") == OWN_ATTENTION and not is_library_code(request)
        dtype = recommendation.get("dtype")
        return cls(
            settings=settings,
            micro_batch_size=candidate["micro_batch_size"],
            own_code=own_code,
            library_code=is_library_code(request),
            sharing=Sharing(candidate.get("context_parallel_size") or 1, candidate.get("context_parallel_layout")),
            architecture=_sizes(request.get("model") or request.get("hf_config")),
            **read_training(request, dtype, own_code=own_code),
            **_context(document, recommendation, request),
        )

    @property
    def has_host_optimizer(self) -> bool:
        """Whether the optimizer stepped in the host's memory."""
        known = None if self.optimizer is None else LIBRARY.get(self.optimizer)
        return known is not None and known.is_on_host

    @property
    def load_dtype(self) -> str | None:
        """The format to load a model's weights in; a Trainer keeps float32 weights in place of master weights."""
        return "float32" if self.master_weights and self.autocast is not None else self.dtype

    def grad_accum_steps(self, world_size: int = 1, micro_batch_size: int | None = None) -> int:
        """Micro-batches of a step that keep the effective batch on `world_size` devices; 1 if it is not known.

        Raises RecommendationError if they do not divide it.
        """
        if self.effective_batch_size is None:
            return 1
        size = micro_batch_size or self.micro_batch_size
        steps, rest = divmod(self.effective_batch_size, size * world_size)
        if rest or not steps:
            raise RecommendationError(
                f"micro_batch_size {size} on {world_size} devices does not divide the batch of "
                f"{self.effective_batch_size} sequences"
            )
        return steps

    def mismatches(self, config: Any) -> list[str]:
        """Return how a transformers configuration differs from the model that was measured."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        sizes = _sizes({**_plain(config), **_plain(text)})
        return [
            f"{name} is {sizes[name]}, not {wanted}"
            for name, wanted in self.architecture.items()
            if name in sizes and sizes[name] != wanted
        ]


def _document(source: Source) -> Mapping[str, Any]:
    if isinstance(source, StepRecommendation):
        return source.to_json()
    if isinstance(source, Mapping):
        return source
    text = str(source)
    try:
        if not text.lstrip().startswith("{"):
            text = Path(source).read_text(encoding="utf-8")
        document = json.loads(text)
    except (OSError, ValueError) as error:
        where = f" in {source}" if text != str(source) else ""
        raise RecommendationError(f"cannot read a recommendation{where}: {error}; {_HOW_TO_WRITE}") from error
    if not isinstance(document, dict):
        raise RecommendationError(f"a recommendation is a JSON object; {_HOW_TO_WRITE}")
    return document


def _dividing(recommendation: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the recommendation with the candidate that divides the batch in place of the recommended one."""
    others = [each for each in recommendation.get("alternatives") or () if isinstance(each, Mapping)]
    other = next((each for each in others if each.get("role") == "dividing"), recommendation)
    return recommendation if other.get("candidate") == recommendation.get("candidate") else {**recommendation, **other}


def _request(document: Mapping[str, Any]) -> Mapping[str, Any]:
    job = document.get("job")
    request = document.get("request") or (job.get("request") if isinstance(job, Mapping) else None)
    return request if isinstance(request, Mapping) else {}


def _settings(recommendation: Mapping[str, Any], candidate: Mapping[str, Any], request: Mapping[str, Any]) -> Settings:
    """Translate the candidate's back ends to the settings of a transformers model.

    A candidate that was measured whole leaves attention and loss as the model has them.
    """
    training = request.get("training") or {}
    attention = candidate.get("attention_backend")
    experts = candidate.get("expert_backend")
    loss = training.get("loss") if isinstance(training, Mapping) else None
    kind = loss.get("kind") if isinstance(loss, Mapping) else None
    is_whole = attention == OWN_ATTENTION
    of_library = request.get("hf_config") is not None
    if is_whole or candidate.get("loss") is not None or of_library:  # its own was measured
        kind = candidate.get("loss")
    stated = {EXECUTION.name: request.get("execution"), LOSS.name: None if kind == "full" else kind}
    values = {choice.name: candidate.get(choice.fields[0]) or stated.get(choice.name) for choice in CHOICES}
    allocator: Any = recommendation.get("allocator") or request.get("allocator") or "default"
    return Settings.of(
        {choice.name: choice.read(value) for choice in CHOICES if (value := values[choice.name]) is not None},
        attention=None if is_whole else f"sdpa:{attention}" if attention in TORCH_KERNELS else attention,
        experts=_experts_setting(experts, of_library=is_whole or of_library) if isinstance(experts, str) else None,
        recompute=candidate.get("recompute", "none"),
        bta_tile=candidate.get("bta_tile"),
        allocator=allocator,
        float8=_float8(training),
    )


def _float8(training: Any) -> Float8 | None:
    precision = training.get("precision") if isinstance(training, Mapping) else None
    return cast(Float8, str(precision).removeprefix("float8_")) if str(precision).startswith("float8_") else None


def _experts_setting(name: str, *, of_library: bool) -> str:
    """Return the experts setting of a transformers model for an expert back end, also one of our reference layers.

    `of_library`: it was measured in a class of the library, which has a `sonicmoe` of its own.
    """
    if of_library and name in LIBRARY_EXPERTS:
        return name
    return f"bexp_{name}" if name in OUR_EXPERTS else library_experts(name)


def _context(
    document: Mapping[str, Any], recommendation: Mapping[str, Any], request: Mapping[str, Any]
) -> dict[str, Any]:
    """Return where the recommendation comes from and what it promises."""
    job = document.get("job")
    job = job if isinstance(job, Mapping) else {}
    hardware = document.get("hardware") or (job.get("report") or {}).get("hardware") or {}
    model = request.get("model") or {}
    whole = recommendation.get("whole_model") or {}
    measured = whole.get("measurement") or {}
    return {
        "effective_batch_size": recommendation.get("batch_size") or request.get("batch_size") or None,
        "seq_length": model.get("seq_length") or request.get("hf_seq_length"),
        "tokens_per_sequence": (recommendation.get("texts") or {}).get("tokens_per_sequence"),
        "confidence": recommendation.get("confidence"),
        "tokens_per_second": whole.get("tokens_per_second") or recommendation.get("tokens_per_second"),
        "peak_bytes": measured.get("peak_bytes") or recommendation.get("measured_peak_bytes"),
        "exploration_id": job.get("id") or document.get("id"),
        "device_name": hardware.get("device_name"),
        "versions": {
            name: str(version)
            for name, version in (hardware.get("versions") or {}).items()
            if name in {"torch", "transformers", "cuda"} and version
        },
    }


def _sizes(values: Any) -> dict[str, Any]:
    values = values if isinstance(values, Mapping) else {}
    moe = values.get("moe")
    values = {**(moe if isinstance(moe, Mapping) else {}), **values}
    sizes = {}
    for name, keys in _SIZES.items():
        value = next((values[key] for key in keys if isinstance(values.get(key), int | str)), None)
        if value is not None:
            sizes[name] = value
    return sizes


def _plain(config: Any) -> dict[str, Any]:
    values = dict(config.to_dict()) if hasattr(config, "to_dict") else dict(vars(config))
    values["model_type"] = getattr(config, "model_type", None)
    return values


def is_library_code(request: Mapping[str, Any]) -> bool:
    """Return whether the transformers library's own classes were measured; a person's target may take a config, too."""
    return request.get("hf_config") is not None and request.get("target") in (None, "transformers")


def quantized_bits(request: Mapping[str, Any]) -> int | None:
    """Return the bits of the quantised weights that were measured, 4 or 8; None for plain ones."""
    quantized = quantization_of(request.get("quantization"), request.get("hf_config"))
    return None if quantized is None else quantized.bits


def read_training(request: Mapping[str, Any], dtype: str | None, *, own_code: bool) -> dict[str, Any]:
    """Return the fields of `RecommendedSetup` that say how the measured model was trained.

    They are empty for a person's own code, which decides all of that, and for a document without a request. `dtype` is
    the format of the matrix products, where the recommendation has it.
    """
    library = is_library_code(request)
    weights: str | None
    if own_code or not (library or request.get("model") is not None):
        return {}
    training = request.get("training") or {}
    optimizer = training.get("optimizer") or {}
    precision = training.get("precision") or "pure"
    if library:  # bfloat16 is the format of the weights, of autocast, or of both
        weights = "float32" if precision == "autocast" else "bfloat16"
        autocast = "bfloat16" if precision in ("autocast", "upcast") or training.get("lora") else None
        master = precision == "master"
    else:
        weights = dtype or (request.get("model") or {}).get("dtype")
        master = weights != "float32" and optimizer.get("master_dtype", "float32") is not None
        autocast = weights if master else None  # a Trainer has no master weights, and the same bytes under autocast
    return {
        "dtype": weights,
        "autocast": autocast,
        "master_weights": master,
        "lora": training.get("lora"),
        "bits": quantized_bits(request) if library else None,
        "optimizer": optimizer.get("name", "adamw"),
        "batching": _batching(request) if library else None,
    }


def _batching(request: Mapping[str, Any]) -> str:
    return "full" if request.get("lengths") is None else request.get("batching") or "padded"
