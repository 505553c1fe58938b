"""The models and texts of fine-tuning, as people make them with peft, bitsandbytes and transformers."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Recipe = dict[str, Any]

DROPPED = ("none", None)
ROOM = 40 * 2**30
"""Bytes that hold any of the models that are quantised."""


def recipe_of(document: Recipe | None) -> Recipe:
    """How the model of a document of `bexp best --json` is trained, apart from what was explored.

    Raises ValueError for what no Trainer can be told: a token budget, and an optimizer that it has no name for.
    """
    from bexp.explorer.model.optimizers import LIBRARY_NAMES  # noqa: PLC0415 - only where one trains

    request = ((document or {}).get("job") or {}).get("request") or {}
    training = request.get("training") or {}
    optimizer = (training.get("optimizer") or {}).get("name", "adamw")
    if request.get("batching") == "token_budget" or optimizer not in LIBRARY_NAMES:
        raise ValueError(f"the Trainer has neither token budgets nor a name for the optimizer '{optimizer}'")
    found = {
        "lora": training.get("lora"),
        "quantization": request.get("quantization"),
        "optimizer": optimizer,
        "packed": request.get("batching") == "packed" or None,
        "float8": training.get("precision", "").partition("float8_")[2] or None,
    }
    return {name: value for name, value in found.items() if value not in DROPPED}


def fields_of(recipe: Recipe) -> Recipe:
    """The fields of `TrainingArguments` that a recipe has beside sizes and checkpointing."""
    from bexp.explorer.model.optimizers import LIBRARY_NAMES  # noqa: PLC0415 - only where one trains

    fields: Recipe = {"optim": LIBRARY_NAMES[recipe["optimizer"]]} if recipe.get("optimizer") else {}
    return fields | ({"bf16": True} if recipe.get("lora") else {})


def load_quantized(plain: Any, name: str, folder: Path) -> Any:
    """The model of a checkpoint with quantised weights; `plain` makes the model whose weights it has.

    The checkpoint is written to `folder` once, and transformers loads it as it loads any other.
    """
    import torch  # noqa: PLC0415 - after the process has set the allocator
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig  # noqa: PLC0415 - likewise

    from bexp.explorer.model.quantization import ARGUMENTS  # noqa: PLC0415 - likewise

    if not (folder / "config.json").exists():
        model = plain()
        model.save_pretrained(folder)
        del model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    place = 0 if torch.cuda.is_available() else "cpu"
    asked = BitsAndBytesConfig(**ARGUMENTS[name])
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=asked, device_map={"": place}, dtype=torch.bfloat16
    )
    model.config.use_cache = False
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model


def adapt(model: Any, recipe: Recipe, *, checkpointing: bool) -> Any:
    """The model with the recipe's adapters, prepared as peft's documentation says; itself if it has none.

    For float8 its linear layers are converted as torchao's documentation says, all but the head.
    """
    if recipe.get("float8"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415 - optional

        config = Float8LinearConfig.from_recipe_name(recipe["float8"])
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    if not recipe.get("lora"):
        return model
    import peft  # noqa: PLC0415 - optional

    from bexp.explorer.model.training import LoRASpec, lora_arguments  # noqa: PLC0415 - only where one trains

    if recipe.get("quantization"):
        model = peft.prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
    model = peft.get_peft_model(model, peft.LoraConfig(**lora_arguments(LoRASpec.model_validate(recipe["lora"]))))
    if checkpointing:
        model.enable_input_require_grads()
    return model


@contextmanager
def checkpoint_folder() -> Iterator[str]:
    """A folder for weights that models are quantised from: in memory where a file system in it has room."""
    shared = Path("/dev/shm")  # noqa: S108 - a folder of its own lies in it
    has_room = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > ROOM
    with tempfile.TemporaryDirectory(dir=shared if has_room else None) as folder:
        yield folder
