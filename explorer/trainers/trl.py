"""TRL: an export for `SFTConfig`, and the YAML of `trl sft --config` in.

An export is JSON for `SFTConfig(**fields)` or TrlParser. The YAML has ScriptArguments, SFTConfig and ModelConfig. Names
as of TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bexp.explorer.dimensions.attention import LIBRARY_ATTENTION
from bexp.explorer.dimensions.experts import LIBRARY_EXPERTS
from bexp.explorer.model.model import DType
from bexp.explorer.trainers.document import TrainerSettings, plain_expert_notes
from bexp.explorer.trainers.fsdp import WRAP
from bexp.explorer.trainers.keys import (
    Formats,
    Key,
    Setting,
    TrainerFile,
    Why,
    because,
    flag,
    key,
    must_be,
    number,
    one_of,
    without_exports,
    words,
)
from bexp.explorer.trainers.trainer import LIBRARY_RUNS_IT, OTHER_LIBRARIES, Trainer, expresses
from bexp.explorer.trainers.transformers import (
    ARGUMENTS,
    HARMLESS,
    LIBRARY_POLICIES,
    LORA,
    REFUSED,
    arguments_export,
    autocast_in,
)

NLL = "nll"
OWN_LOSS = "computes its loss in tiles of tokens and holds no logits"
_DTYPES = {name: name for name in ("auto", "float32", "bfloat16")}


def _formats(said: Formats) -> tuple[str, str | None]:
    """Return the formats: weights in `dtype`, by default float32, and autocast unless `bf16` is false."""
    weights = said.checkpoint if said.weights == "auto" else said.weights
    if said.is_quantized and weights != "bfloat16":
        raise ValueError("with load_in_4bit or load_in_8bit, weights are measured in bfloat16: say dtype: bfloat16")
    if said.half and weights == "float32":
        return "bfloat16", "autocast"
    if said.has_adapters and not said.half and weights != "float32":
        raise ValueError("adapters are measured under autocast: say bf16: true")
    return weights or "float32", "pure"


def _packing_strategy(value: Any) -> None:
    if value not in ("bfd", "bfd_split"):
        raise ValueError("rows that cut texts are not measured: say packing_strategy: bfd")


def _padding(value: Any) -> None:
    if value not in ("auto", None, 0, 1):  # auto pads on one kind of device, which is not measured
        raise ValueError("remove it, and round the lengths that you state up to it")


def _launched(value: Any) -> Any:
    """Return the content of a configuration of `accelerate launch`, of which TRL has some by name."""
    if isinstance(value, Mapping):
        return value
    if value not in LAUNCHES:
        raise ValueError(f"no such file was found, and TRL has none of this name: {', '.join(LAUNCHES)}")
    return LAUNCHES[value]


_EIGHT = {"num_processes": 8, "mixed_precision": "bf16"}
_BY_FSDP = {**_EIGHT, "distributed_type": "FSDP"}
_WRAPPED = {"fsdp_auto_wrap_policy": WRAP}
LAUNCHES: Mapping[str, Mapping[str, Any]] = {
    "single_gpu": {"num_processes": 1, "distributed_type": "NO"},
    "multi_gpu": {**_EIGHT, "distributed_type": "MULTI_GPU"},
    "fsdp1": {**_BY_FSDP, "fsdp_config": {"fsdp_version": 1, **_WRAPPED}},
    "fsdp2": {**_BY_FSDP, "fsdp_config": {"fsdp_version": 2, **_WRAPPED}},
    **{
        f"zero{stage}": {**_EIGHT, "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage}}
        for stage in (1, 2, 3)
    },
}
"""TRL's own configurations of `accelerate launch`, for eight processes but for the first."""
KEYS = {
    **ARGUMENTS,
    # By default TRL computes under autocast.
    "bf16": Key(Setting.HALF, flag, autocast_in(DType.BFLOAT16, otherwise=False)),
    "fp16": Key(write=autocast_in(DType.FLOAT16, otherwise=False)),
    "packing": Key(Setting.PACKING, flag, lambda settings: settings.packs),
    # Best-fit packing keeps documents apart by flattening a micro-batch into one row.
    "padding_free": Key(Setting.PADDING_FREE, flag, lambda settings: settings.packs),
    "packing_strategy": Key(None, _packing_strategy, lambda settings: "bfd" if settings.packs else None),
    "loss_type": Key(
        Setting.LOSS,
        one_of({NLL: NLL, "chunked_nll": NLL}),  # an older name
        lambda settings: None if settings.is_own_code else NLL,
    ),
    "max_length": key(Setting.SEQ_LENGTH),
    "pad_to_multiple_of": Key(None, _padding),
    **without_exports(LORA),
    "model_name_or_path": Key(Setting.MODEL),
    "dtype": Key(Setting.WEIGHTS, one_of(_DTYPES)),
    "torch_dtype": Key(Setting.WEIGHTS, one_of(_DTYPES)),
    "use_peft": Key(Setting.ADAPTERS, flag),
    "use_dora": Key(Setting.DORA, flag),
    "use_rslora": Key(Setting.RSLORA, flag),
    "use_bnb_nested_quant": Key(Setting.NESTED, flag),
    "bnb_4bit_quant_type": must_be("nf4", reason=Why.OTHER_WEIGHTS),
    "bnb_4bit_quant_storage": must_be("uint8", reason=Why.OTHER_WEIGHTS),
    "attn_implementation": Key(Setting.ATTENTION),
    "accelerate_config": Key(Setting.LAUNCH, _launched),
    "num_processes": Key(Setting.DEVICES, number),
}
FILE = TrainerFile(
    model="model_name_or_path",
    keys=KEYS,
    defaults={
        Setting.MICRO_BATCH_SIZE: 8,
        Setting.SEQ_LENGTH: 1024,
        Setting.OPTIMIZER: "adamw_torch_fused",
        Setting.HALF: True,
        Setting.WEIGHTS: "float32",
        Setting.NESTED: False,
        Setting.RECOMPUTATION: True,
        Setting.LOSS: NLL,
        Setting.R: 16,
        Setting.ALPHA: 32,
        Setting.DROPOUT: 0.05,
    },
    formats=_formats,
    other_losses={
        NLL: f"TRL {OWN_LOSS} (loss_type: nll). That loss is not measured. The answer is for a loss that holds all "
        "logits at once, so that TRL needs less memory, and its speed is another; `bexp tune -- COMMAND` measures it"
    },
    refused={
        **REFUSED,
        **because(
            {
                Why.OFFLOADING: "activation_offloading",
                "say dtype and attn_implementation at the top of the file instead": "model_init_kwargs",
                "is for several devices of old models: remove it": "ignore_bias_buffers",
            }
        ),
    },
    harmless=HARMLESS
    | words(
        """
        use_cache trackio_* liger_kernel_config model_revision lora_task_type trust_remote_code router_aux_loss_coef
        chat_template_path dataset_* datasets streaming test_split_size eos_token pad_token truncation_mode
        shuffle_dataset completion_only_loss assistant_only_loss
        """
    ),
)


def _precision_notes(settings: TrainerSettings) -> list[str]:
    """Return notes on number formats in quantised models that TRL sets otherwise than was measured."""
    if settings.quantization is None:
        return []
    return [
        "memory: TRL casts what it trains of a quantised model to bfloat16 (adapters, modules_to_save); it was "
        "measured in float32, so it needs less",
        *plain_expert_notes(settings),
    ]


TRL = Trainer(
    name="trl",
    title="TRL",
    formats={"trl": arguments_export(KEYS, _precision_notes)},
    file=FILE,
    expresses=expresses(
        recompute=LIBRARY_POLICIES, attention=LIBRARY_ATTENTION, experts=LIBRARY_EXPERTS, optimizer={OTHER_LIBRARIES}
    ),
    flattens=True,
    targets=LIBRARY_RUNS_IT,
    awaits_losses=True,
    has_deepspeed=True,
    widens_shards=True,
    own_loss=OWN_LOSS,
    halves_adapters=True,
    halves_experts=True,
)
