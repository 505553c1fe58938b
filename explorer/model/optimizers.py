"""The optimizers that a request can name, by their names in transformers' `TrainingArguments.optim`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

OptimizerName = Literal[
    "adamw",
    "sgd",
    "adafactor",
    "adagrad",
    "rmsprop",
    "adamw_bnb_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "ademamix",
    "ademamix_8bit",
    "lion_32bit",
    "lion_8bit",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
    "adamw_cpu_offload",
    "muon",
]
ALIASES: Mapping[str, OptimizerName] = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw": "paged_adamw_32bit",
}
"""Names that mean one of the others. AdamW is measured as torch's fused kernels compute it."""
NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
BITSANDBYTES, TORCHAO = "bitsandbytes", "torchao"
MUON: OptimizerName = "muon"


@dataclass(frozen=True, slots=True)
class LibraryOptimizer:
    """An optimizer whose state is read from the real one.

    `maker` is the code of a script that makes it, and `package` its need in addition to torch and transformers. One
    that `is_on_host` steps in the host's memory. One that `is_paged` may move its state there; it is measured without
    that. `note` says how a Trainer is given one that TrainingArguments have no name for.
    """

    maker: str
    package: str | None = None
    is_on_host: bool = False
    is_paged: bool = False
    note: str | None = None

    @property
    def compiles(self) -> bool:
        """Whether its step is compiled, which leaves code in a process."""
        return self.package == TORCHAO and not self.is_on_host


ON_HOST_NOTE = (
    "optimizer: pass Trainer(optimizer_cls_and_kwargs=(torchao.optim.CPUOffloadOptimizer, "
    '{"optimizer_class": torch.optim.AdamW, "lr": ...})) and max_grad_norm=0, because it takes gradients to the host '
    "before they could be clipped"
)
LIBRARY: Mapping[str, LibraryOptimizer] = {
    "adafactor": LibraryOptimizer("transformers.Adafactor(..., scale_parameter=False, relative_step=False)"),
    "adagrad": LibraryOptimizer("torch.optim.Adagrad(...)"),
    "rmsprop": LibraryOptimizer("torch.optim.RMSprop(...)"),
    "adamw_bnb_8bit": LibraryOptimizer("bitsandbytes.optim.AdamW8bit(...)", BITSANDBYTES),
    "paged_adamw_32bit": LibraryOptimizer("bitsandbytes.optim.PagedAdamW32bit(...)", BITSANDBYTES, is_paged=True),
    "paged_adamw_8bit": LibraryOptimizer("bitsandbytes.optim.PagedAdamW8bit(...)", BITSANDBYTES, is_paged=True),
    "ademamix": LibraryOptimizer("bitsandbytes.optim.AdEMAMix(...)", BITSANDBYTES),
    "ademamix_8bit": LibraryOptimizer("bitsandbytes.optim.AdEMAMix8bit(...)", BITSANDBYTES),
    "lion_32bit": LibraryOptimizer("bitsandbytes.optim.Lion(...)", BITSANDBYTES),
    "lion_8bit": LibraryOptimizer("bitsandbytes.optim.Lion8bit(...)", BITSANDBYTES),
    "adamw_torch_8bit": LibraryOptimizer("torchao.optim.AdamW8bit(...)", TORCHAO),
    "adamw_torch_4bit": LibraryOptimizer("torchao.optim.AdamW4bit(...)", TORCHAO),
    "adamw_cpu_offload": LibraryOptimizer(
        "torchao.optim.CPUOffloadOptimizer(..., torch.optim.AdamW)", TORCHAO, is_on_host=True, note=ON_HOST_NOTE
    ),
    MUON: LibraryOptimizer(
        "bexp.muon(model, ...)",
        note="optimizer: pass Trainer(optimizers=(bexp.muon(model, lr=...), None)); TrainingArguments have no Muon",
    ),
}
"""All but torch's fused AdamW and SGD, whose state follows from the number formats."""
LIBRARY_NAMES: Mapping[str, str] = {
    name: "adamw_torch_fused" if name == "adamw" else name
    for name in NAMES
    if name not in LIBRARY or LIBRARY[name].note is None
}
"""The transformers library's names of the measured optimizers, as far as it has names."""
LIBRARY_ARGUMENTS: Mapping[str, str] = {"sgd": "momentum=0.9"}
"""The value of `TrainingArguments.optim_args` where the library's own choice differs from the measured one."""
PAGED_NOTE = (
    "optimizer: its pages are counted on the device, where they stay while there is room; larger micro-batches, for "
    "which they would have to leave it, are not tried"
)


def read_name(value: object) -> object:
    """Return a name, or the name that an alias means; raise ValueError for an optimizer that is not measured."""
    name = ALIASES.get(value, value) if isinstance(value, str) else value
    if name in NAMES:
        return name
    raise ValueError(
        f"must be one of {', '.join((*NAMES, *ALIASES))}; any other optimizer is measured in your own command "
        "(`bexp tune -- COMMAND`), or by a target of your own (--target)"
    )
