"""The target of a request: the code whose training step is measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from bexp.explorer.model.optimizers import BITSANDBYTES
from bexp.explorer.model.quantization import PLAIN, own_method
from bexp.explorer.model.spelling import shortened

BEXP = "bexp"
"""The reference layers of this project. A `ModelSpec` describes the model."""

TRANSFORMERS = "transformers"
"""The classes of the installed transformers library. A Hugging Face config.json describes the model."""

LOCAL = "local"
"""The target that a person names by its file, for one exploration on their machine. See also `name_local_target`."""


def _refuse_path(name: Any) -> Any:
    if isinstance(name, str) and (":" in name or "/" in name or (name.endswith(".py") and not is_local_target(name))):
        raise ValueError("a service measures targets by registered names; `bexp explore` measures one from a file")
    return name


OWN_ATTENTION = "own"
"""The attention back end of a model that is measured whole: the one that its code calls."""

TargetName = Annotated[str, BeforeValidator(_refuse_path), Field(pattern=r"^[a-z][a-z0-9_.-]{0,63}$")]
LONGEST_NAME = 64

OWN_TARGET = (
    "a target of your own measures it whole: bexp explore config.json --target "
    "examples/targets/hugging_face.py:Target (docs/targets.md)"
)
"""The hint how any other model is measured."""

OTHER_HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice", "MaskedLM")
"""The tasks of transformers' classes whose head and loss are not those of a causal language model."""

OTHER_DTYPES = ("float32", "float16")
"""Values of `dtype` in a config.json that target `transformers` measures in bfloat16."""


def name_local_target(reference: str) -> str:
    """Return the target's name for a file of a person: `local.train` for `/home/me/train.py:Target`."""
    stem = PurePath(reference.rpartition(":")[0]).stem.lower()
    return f"{LOCAL}.{re.sub('[^a-z0-9_.-]', '-', stem)}"[:LONGEST_NAME]


def is_local_target(name: str) -> bool:
    """Return whether a target is a file on somebody's machine."""
    return name == LOCAL or name.startswith(f"{LOCAL}.")


def describe_target(name: str, version: str | None, class_name: str | None = None) -> str:
    """Return the measured code, for a person: `transformers 5.23.0, LlamaForCausalLM`."""
    versioned = f"{name} {version}" if version else name
    return f"{versioned}, {class_name}" if class_name else versioned


def unlike_the_config(config: Mapping[str, Any], quantization: object = None) -> list[str]:
    """Return notices of the values of a config.json for training that target `transformers` measures otherwise.

    `quantization` is the request's field of this name. Weights that bitsandbytes quantises are measured.
    """
    differences = []
    method = own_method(config)
    if method is not None and (method != BITSANDBYTES or quantization == PLAIN):
        named = f" ({shortened(method)})" if method != "?" else ""
        differences.append(
            f"quantization_config{named} is left out: plain weights are measured, "
            "so memory and speed are not those of training on quantised ones"
        )
    classes = config.get("architectures")
    for name in classes if isinstance(classes, list | tuple) else ():
        if isinstance(name, str) and name.endswith(tuple(f"For{head}" for head in OTHER_HEADS)):
            differences.append(
                f"{shortened(name)} has another head and loss than what is measured: the causal language model"
            )
            break
    text = config.get("text_config")
    said = {**config, **text} if isinstance(text, Mapping) else config
    dtype = said.get("dtype", said.get("torch_dtype"))
    if dtype in OTHER_DTYPES:
        differences.append(
            f"dtype {dtype} of config.json is not used: weights are measured in bfloat16, or in float32 under bf16 "
            "autocast with training.precision=autocast"
        )
    if said.get("output_router_logits") is True:
        differences.append(
            "output_router_logits: the balancing loss of the routers is left out of the composed blocks; whole models "
            "are run with it"
        )
    return differences
