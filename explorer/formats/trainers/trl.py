"""The keys of a YAML for `trl sft --config`: ScriptArguments, SFTConfig and ModelConfig. Names as of TRL 1.16."""

from __future__ import annotations

from typing import Any

from bexp.explorer.formats.trainers.library_arguments import IGNORED, LORA, REFUSED, SETTINGS
from bexp.explorer.formats.trainers.trainer_file import (
    OFFLOADING,
    OTHER_WEIGHTS,
    Formats,
    Setting,
    TrainerFile,
    because,
    flag,
    must_be,
    one_of,
    same,
    words,
)

CHUNKED = "chunked_nll"
_DTYPES = {name: name for name in ("auto", "float32", "bfloat16")}


def _formats(said: Formats) -> tuple[str, str | None]:
    """It loads weights in float32 unless `dtype` says otherwise, and computes under autocast unless `bf16` is false."""
    weights = said.checkpoint if said.weights == "auto" else said.weights
    if said.is_quantized and weights != "bfloat16":
        raise ValueError("beside load_in_4bit or load_in_8bit, weights are measured in bfloat16: say dtype: bfloat16")
    if said.half and weights == "float32":
        return "bfloat16", "autocast"
    if said.has_adapters and not said.half and weights != "float32":
        raise ValueError("adapters are measured under autocast: say bf16: true")
    return weights or "float32", "pure"


def _packing_strategy(value: Any) -> None:
    if value not in ("bfd", "bfd_split"):
        raise ValueError("rows that cut texts are not what TRL is told: say packing_strategy: bfd")


TRL = TrainerFile(
    model="model_name_or_path",
    settings={
        **SETTINGS,
        **LORA,
        "model_name_or_path": (Setting.MODEL, same),
        "max_length": (Setting.SEQ_LENGTH, same),
        "dtype": (Setting.WEIGHTS, one_of(_DTYPES)),
        "torch_dtype": (Setting.WEIGHTS, one_of(_DTYPES)),
        "use_peft": (Setting.ADAPTERS, flag),
        "use_dora": (Setting.DORA, flag),
        "use_rslora": (Setting.RSLORA, flag),
        "use_bnb_nested_quant": (Setting.NESTED, flag),
        "bnb_4bit_quant_type": must_be("nf4", reason=OTHER_WEIGHTS),
        "bnb_4bit_quant_storage": must_be("uint8", reason=OTHER_WEIGHTS),
        "packing": (Setting.PACKING, flag),
        "padding_free": (Setting.PADDING_FREE, flag),
        "packing_strategy": (None, _packing_strategy),
        "attn_implementation": (Setting.ATTENTION, same),
        "loss_type": (Setting.LOSS, one_of({"nll": "library", CHUNKED: CHUNKED})),
    },
    defaults={
        Setting.MICRO_BATCH_SIZE: 8,
        Setting.SEQ_LENGTH: 1024,
        Setting.OPTIMIZER: "adamw_torch_fused",
        Setting.HALF: True,
        Setting.WEIGHTS: "float32",
        Setting.NESTED: False,
        Setting.RECOMPUTATION: True,
        Setting.LOSS: CHUNKED,
        Setting.R: 16,
        Setting.ALPHA: 32,
        Setting.DROPOUT: 0.05,
    },
    formats=_formats,
    other_losses={
        CHUNKED: "TRL computes its loss in chunks of tokens by default (loss_type: chunked_nll). That loss is not "
        "measured. The answer is for the plain loss, which holds all logits at once, and the export sets "
        "loss_type: nll. With chunked_nll, speed and memory would be others"
    },
    refused={
        **REFUSED,
        **because(
            {
                OFFLOADING: "activation_offloading",
                "say dtype and attn_implementation at the top of the file instead": "model_init_kwargs",
                "remove it, and round the lengths that you state up to it": "pad_to_multiple_of",
                "is for several devices of old models: remove it": "ignore_bias_buffers",
            }
        ),
    },
    harmless=IGNORED
    | words(
        """
        model_revision lora_task_type trust_remote_code router_aux_loss_coef chat_template_path dataset_* datasets
        streaming test_split_size eos_token pad_token truncation_mode shuffle_dataset completion_only_loss
        assistant_only_loss
        """
    ),
)
