"""A Python module that makes a Lightning `Trainer` and sets the layers of a model up. Names as of Lightning 2.6."""

from __future__ import annotations

from bexp.explorer.dimensions.attention import TORCH_CHOICE
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.experts import LIBRARY_EXPERTS
from bexp.explorer.dimensions.recompute import DIFFERENT_LAYERS, FIRST_LAYERS, SHARES, Recompute
from bexp.explorer.model.optimizers import MUON
from bexp.explorer.model.training import Sharding
from bexp.explorer.trainers.document import (
    HALF_NAMES,
    ExportDocument,
    TrainerSettings,
    gathering_notes,
    length_notes,
    model_notes,
    optimizer_notes,
    python_export,
)
from bexp.explorer.trainers.trainer import LIBRARY_RUNS_IT, MUON_WITH_EXPERTS, OTHER_LIBRARIES, Trainer, expresses

KERNELS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
"""torch's names of the kernels that can be pinned."""

_TRAINER = """\
import lightning
{imports}
MICRO_BATCH_SIZE = {micro_batch_size}


def make_trainer({layer_class}devices={devices}, num_nodes=1, **others):
    \"\"\"Return a trainer{batch}; data loaders give MICRO_BATCH_SIZE sequences.

    `devices` are those of one node.{wrapped}
    \"\"\"
    if devices * num_nodes != {devices}:
        raise ValueError(f"devices={{devices}} on num_nodes={{num_nodes}} are not the {devices} that this file is for")
    return lightning.Trainer(
        accelerator="{accelerator}",
        devices=devices,
        num_nodes=num_nodes,
        strategy={strategy},
        precision="{precision}",
{accumulation}        **others,
    )
"""
_WRAPPED = " `layer_class` is the class of the model's decoder layers, which are gathered one by one."
_RECOMPUTE = """

def recompute(layers):
    \"\"\"Recompute {number} of a model's decoder layers, a ModuleList, in backward.\"\"\"
    for index in {indices}:
        layers[index] = checkpoint_wrapper(layers[index])
"""
_COMPILE = """

def compile_layers(layers):
    \"\"\"Compile each of a model's decoder layers; call this last.\"\"\"
{whole}    for layer in layers:
        layer.compile()
"""
_WHOLE_GRAPHS = "    torch._dynamo.config.optimize_ddp = False  # as measured: DDP's buckets split no layer's graph\n"
_ATTENTION = """

def attention():
    \"\"\"Pin torch's attention kernel: `with attention(): trainer.fit(...)`.\"\"\"
    return sdpa_kernel(SDPBackend.{kernel})
"""


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the module. Lightning calls autocast `mixed`, and weights in half precision `true`."""
    imports, functions = [], []
    strategy, layer_class, wrapped = '"auto"' if settings.num_devices == 1 else '"ddp"', "", ""
    if settings.sharding is not Sharding.NONE:
        imports.append("from lightning.pytorch.strategies import FSDPStrategy")
        shards = "FULL_SHARD" if settings.sharding is Sharding.ZERO3 else "SHARD_GRAD_OP"
        strategy = f'FSDPStrategy(sharding_strategy="{shards}", auto_wrap_policy={{layer_class}})'
        layer_class, wrapped = "layer_class, ", _WRAPPED
    if settings.recompute is not Recompute.NONE:
        wrapper = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
        imports.append(f"from {wrapper} import checkpoint_wrapper")
        indices = settings.recomputed_layers
        number, written = str(len(indices)), str(indices)
        if settings.recompute is Recompute.FULL:
            number, written = "all", "range(len(layers))"
        elif indices == tuple(range(len(indices))):
            number, written = f"the first {number}", f"range({number})"
        functions.append(_RECOMPUTE.format(number=number, indices=written))
    if settings.compiled_layers:
        imports += ["import torch"] if strategy == '"ddp"' else []
        functions.append(_COMPILE.format(whole=_WHOLE_GRAPHS if strategy == '"ddp"' else ""))
    if settings.attention in KERNELS:
        imports.append("from torch.nn.attention import SDPBackend, sdpa_kernel")
        functions.append(_ATTENTION.format(kernel=KERNELS[settings.attention]))
    form = HALF_NAMES[settings.dtype].replace("fp", "") if settings.dtype in HALF_NAMES else "32"
    steps = settings.grad_accum_steps
    code = _TRAINER.format(
        imports="".join(f"{line}\n" for line in imports),
        micro_batch_size=settings.micro_batch_size,
        batch="" if settings.batch_size is None else f" with a batch of {settings.batch_size}",
        accelerator="cpu" if settings.device_kind == "cpu" else "gpu",
        devices=settings.num_devices,
        strategy=strategy,
        layer_class=layer_class,
        wrapped=wrapped,
        precision=f"{form}-{'mixed' if settings.has_autocast else 'true'}",
        accumulation="" if steps is None else f"        accumulate_grad_batches={steps},\n",
    )
    notes = [*model_notes(settings), *optimizer_notes(settings), *length_notes(settings), *gathering_notes(settings)]
    return python_export(settings, code + "".join(functions), notes)


LIGHTNING = Trainer(
    name="lightning",
    title="Lightning",
    formats={"lightning": render},
    expresses=expresses(
        attention={TORCH_CHOICE, *KERNELS},
        experts=LIBRARY_EXPERTS,
        recompute={Recompute.NONE, Recompute.FULL, *SHARES, FIRST_LAYERS, DIFFERENT_LAYERS},
        execution={Execution.EAGER, Execution.COMPILE},
        optimizer={OTHER_LIBRARIES, MUON, MUON_WITH_EXPERTS},
        sharded_adapters=(),  # its FSDP makes one tensor of a layer's parameters
    ),
    targets=LIBRARY_RUNS_IT,
)
