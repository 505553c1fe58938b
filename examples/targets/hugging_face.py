"""Any model of transformers, measured whole: `bexp explore config.json --target hugging_face.py:Target`.

The library's class for the type is built: a causal language model, an encoder, an encoder with a decoder, or a network
for images. Batches are random tokens, images and sounds. A vision-language model gets text alone. If your batches hold
more, write `batch` as they are.

The request hugging_face.yaml stands for a folder with a config.json, and with the Python files that its `auto_map`
names, if it has one. They are run, so name a folder that you trust.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

TASKS = (
    *("Seq2SeqLM", "SpeechSeq2Seq", "ImageTextToText", "MaskedLM", "CausalLM"),
    *("ZeroShotImageClassification", "ImageClassification"),
)
"""What a model is built for: what `architectures` of its config.json names, else the first that its type has."""
OWN_FIELDS = ("seq_length", "gradient_checkpointing")


class Target:
    """Forward, the model's own loss, and backward, as transformers' Trainer runs them without accumulation."""

    def __init__(self) -> None:
        self.dimensions = {"gradient_checkpointing": [False, True]}

    def build(self, config: Mapping[str, Any], device: torch.device) -> Any:
        if "folder" in config:
            loaded = transformers.AutoConfig.from_pretrained(config["folder"], trust_remote_code=True)
        else:
            loaded = transformers.AutoConfig.for_model(**{k: v for k, v in config.items() if k not in OWN_FIELDS})
        for name, value in config.get("overrides", {}).items():  # such as {"output_router_logits": true}
            setattr(loaded, name, value)
        if getattr(loaded, "decoder_start_token_id", None) is None:
            loaded.decoder_start_token_id = 0
        self.dtype = getattr(torch, config.get("dtype", "bfloat16") if "folder" in config else "bfloat16")
        with device:
            model = build_model(loaded, self.dtype)
        self.text = loaded.get_text_config(decoder=True)
        self.text.use_cache = loaded.use_cache = False
        self.config, self.main_input = loaded, model.main_input_name
        self.inputs = set(inspect.signature(model.forward).parameters)
        if "input_ids" in self.inputs or "input_features" in self.inputs:  # else rates count images
            self.seq_length = config["seq_length"]
        if config["gradient_checkpointing"]:
            recompute = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            recompute()  # its name changed in the library
        return model.train()

    def batch(self, micro_batch_size: int, device: torch.device) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if hasattr(self, "seq_length"):
            tokens = torch.randint(self.text.vocab_size, (micro_batch_size, self.seq_length), device=device)
            made |= {"input_ids": tokens.masked_fill(torch.isin(tokens, self.special_tokens(device)), 0)}
            made |= {"labels": tokens} if "labels" in self.inputs else {}
        if self.main_input == "input_features":
            frames = 2 * self.config.max_source_positions
            del made["input_ids"]
            made[self.main_input] = self.noise(device, micro_batch_size, self.config.num_mel_bins, frames)
        if "return_loss" in self.inputs or not hasattr(self, "seq_length"):
            vision = getattr(self.config, "vision_config", self.config)
            size = getattr(vision, "image_size", 224)
            made["pixel_values"] = self.noise(device, micro_batch_size, vision.num_channels, size, size)
            if "return_loss" in self.inputs:  # of images and texts that belong together
                made["return_loss"] = True
            else:
                made["labels"] = torch.randint(self.config.num_labels, (micro_batch_size,), device=device)
        return made

    def step(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        return loss

    def noise(self, device: torch.device, *shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=self.dtype)

    def special_tokens(self, device: torch.device) -> Tensor:
        """Tokens that stand for an image or a sound, which batches of text do not have."""
        found = [value for name, value in self.config.to_dict().items() if name.endswith(("_token_id", "_token_index"))]
        return torch.tensor([value for value in found if isinstance(value, int)], device=device)


def build_model(config: Any, dtype: torch.dtype) -> Any:
    named = str(next(iter(config.architectures or ()), ""))
    for task in sorted(TASKS, key=lambda task: not named.endswith(f"For{task}")):
        auto_class = getattr(transformers, f"AutoModelFor{task}")
        try:
            return auto_class.from_config(config, dtype=dtype, trust_remote_code=True)
        except ValueError as error:
            if "Unrecognized configuration" not in str(error):
                raise
    raise ValueError(f"{config.model_type} has no class for {', '.join(TASKS)}: build yours here")
