"""The training of a model: the optimizer, the loss and the sharding, with their memory."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from bexp.explorer.model.base import Frozen, RuleError, is_false, is_null, is_zero
from bexp.explorer.model.model import DType
from bexp.explorer.model.optimizers import LIBRARY, MUON, LibraryOptimizer, OptimizerName, read_name


class Sharding(StrEnum):
    """The training state that data-parallel devices divide among them (Rajbhandari et al., 2020, arXiv:1910.02054)."""

    NONE = "none"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"

    @property
    def level(self) -> int:
        """0 for none; 1 shards optimizer states, 2 also gradients, 3 also parameters."""
        return {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}[self.value]


Precision = Literal["pure", "autocast", "master", "upcast", "float8_tensorwise", "float8_rowwise"]


class OptimizerSpec(Frozen):
    """Optimizer and number formats; the default is mixed precision with 16 bytes a parameter in bf16."""

    name: Annotated[OptimizerName, BeforeValidator(read_name)] = Field(
        "adamw",
        description="torch's fused AdamW, fused SGD with momentum, or another optimizer by its name in transformers' "
        "TrainingArguments (`optim`); those need target `transformers`, and their package. `muon`, which the reference "
        "layers have too, is torch's for matrices of hidden layers, with AdamW for all else.",
    )
    grad_dtype: DType | None = Field(None, description="Default: the model's dtype.")
    master_dtype: Literal[DType.FLOAT32] | None = Field(
        DType.FLOAT32, description="float32 master weights for half-precision parameters; null for none."
    )
    state_dtype: DType | None = Field(
        None, description="The format of the moments; default: float32 with master weights, else the model's dtype."
    )

    @property
    def of_library(self) -> LibraryOptimizer | None:
        """The description of an optimizer whose state is read from the real one; None for AdamW and SGD.

        The reference layers have Muon as well, whose state there follows from the number formats.
        """
        return LIBRARY.get(self.name)

    @property
    def num_states(self) -> int:
        """Number of moments a parameter; of Muon, those of parameters that AdamW steps."""
        return 2 if self.name in ("adamw", MUON) else 1

    def has_master(self, dtype: DType) -> bool:
        """Return whether master weights exist; parameters in float32 need none."""
        return self.master_dtype is not None and dtype is not DType.FLOAT32

    def gradient_dtype(self, dtype: DType) -> DType:
        """Return the format in which gradients of parameters in `dtype` are accumulated."""
        return self.grad_dtype or dtype

    def moment_dtype(self, dtype: DType) -> DType:
        """Return the format of the moments of parameters in `dtype`."""
        return self.state_dtype or (DType.FLOAT32 if self.has_master(dtype) else dtype)


class LossSpec(Frozen):
    """Cross entropy over the vocabulary.

    `chunked` computes logits and their gradient for `chunk_tokens` tokens at a time, so that the full logits never
    exist; `full` keeps them, in float32, as a plain cross_entropy call does.
    """

    kind: Literal["chunked", "full"] = "chunked"
    chunk_tokens: Annotated[int, Field(ge=128, le=1 << 20)] = 4096


Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9_.-]+$")]
LINEAR_MODULES = "linear-modules"
"""The linear layers of a model by their names, but the output layer, and no experts that are one tensor."""
Names = Annotated[tuple[Name, ...], Field(min_length=1, max_length=64)]


class LoRASpec(Frozen):
    """Low-rank adapters on frozen weights (Hu et al., 2021, arXiv:2106.09685), as the peft library adds them."""

    r: Annotated[int, Field(ge=1, le=4096)] = Field(description="Rank of the adapters.")
    target_modules: Literal["all-linear", "linear-modules"] | Names | None = Field(
        None,
        description="Names of the modules that get adapters. `all-linear` is peft's, with experts in one tensor and "
        "their routers; `linear-modules` has linear layers alone, as Axolotl and LLaMA-Factory list them.",
    )
    target_parameters: Names | None = Field(
        None,
        description="Names of parameters that get adapters, such as `experts.gate_up_proj` of experts in one tensor.",
        exclude_if=is_null,
    )
    alpha: Annotated[float, Field(gt=0, le=1 << 20)] | None = Field(
        None, description="The adapters' output is scaled by alpha / r; null: alpha = r."
    )
    use_rslora: bool = Field(
        False, description="Scaled by alpha / sqrt(r) (Kalajdzievski, 2023, arXiv:2312.03732).", exclude_if=is_false
    )
    use_dora: bool = Field(
        False, description="Weight-decomposed adapters (Liu et al., 2024, arXiv:2402.09353).", exclude_if=is_false
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="Share of each adapted module's input that is zeroed; above 0 each module keeps a copy of it.",
        exclude_if=is_zero,
    )
    modules_to_save: Names | None = Field(
        None,
        description="Modules that are trained whole, each as a copy: `embed_tokens`, `lm_head`.",
        exclude_if=is_null,
    )

    @field_validator("target_modules", "target_parameters", "modules_to_save", mode="before")
    @classmethod
    def _list_one_name(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) and value not in ("all-linear", LINEAR_MODULES) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target_modules is None and self.target_parameters is None:
            raise RuleError("is missing: it names what gets adapters, as target_parameters does", "target_modules")
        if self.use_dora and self.target_parameters is not None:
            raise RuleError("peft has no DoRA of parameters: name modules alone", "use_dora", "target_parameters")
        return self


def lora_arguments(lora: LoRASpec) -> dict[str, Any]:
    """Return the arguments of the peft library's LoraConfig that differ from its defaults."""
    modules = lora.target_modules
    arguments: dict[str, Any] = {
        "r": lora.r,
        "lora_alpha": lora.r if lora.alpha is None else lora.alpha,
        "target_modules": modules if isinstance(modules, str) else list(modules or ()),
    }
    if lora.dropout:
        arguments["lora_dropout"] = lora.dropout
    for name in ("target_parameters", "modules_to_save"):
        if (names := getattr(lora, name)) is not None:
            arguments[name] = list(names)
    return arguments | {name: True for name in ("use_rslora", "use_dora") if getattr(lora, name)}


class TrainingSpec(Frozen):
    """State and loss of training. Eval mode uses only the loss."""

    optimizer: OptimizerSpec = OptimizerSpec()
    loss: LossSpec = LossSpec()
    sharding: Sharding = Sharding.NONE
    precision: Precision = Field(
        "pure",
        description="`pure`: parameters in the model's dtype. `autocast`: float32 parameters, computed with under "
        "bf16 autocast. `master`: parameters and gradients in bfloat16, with float32 master weights and moments, as "
        "DeepSpeed's `bf16` and shards of FSDP's keep them. `upcast`: as `pure`, but with norms, embeddings, output "
        "layer and routers in float32, computed with under autocast; for trainer `axolotl`, which does that. "
        "`float8_tensorwise`, `float8_rowwise`: as `pure`, with linear layers of decoder layers in float8 by torchao's "
        "recipe. All but `pure` need target `transformers`. LoRA adapters are in float32 with `pure` and `autocast`, "
        "and computed with under autocast; other precisions train all weights.",
    )
    lora: LoRASpec | None = Field(None, description="Trains adapters in place of the weights; needs `transformers`.")

    @property
    def float8_recipe(self) -> str | None:
        """The recipe of torchao that computes linear layers in float8; None without one."""
        recipe = self.precision.removeprefix("float8_")
        return None if recipe == self.precision else recipe

    @property
    def keeps_master_weights(self) -> bool:
        """Whether a model's own code trains with float32 master weights; for the reference layers see `optimizer`."""
        return self.precision == "master"
