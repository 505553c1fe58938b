"""A configuration of `accelerate launch`, as YAML, in and out. Names as of accelerate 1.15.

The file configures the processes. The micro-batch, the accumulation and the model belong to the script, so the header
of an export names the settings of the script. In, it stands next to a trainer's own file or to any model, and says how
many processes train, and what they shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bexp.explorer.dimensions.attention import LIBRARY_ATTENTION
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.experts import LIBRARY_EXPERTS
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.optimizers import MUON
from bexp.explorer.model.spelling import shortened
from bexp.explorer.model.training import Sharding
from bexp.explorer.model.translation import Location, Section, is_unset
from bexp.explorer.trainers.deepspeed import OFFLOADING, read_config, uses_deepspeed
from bexp.explorer.trainers.document import (
    HALF_NAMES,
    ExportDocument,
    TrainerSettings,
    script_notes,
    yaml_export,
)
from bexp.explorer.trainers.fsdp import (
    PREFIX,
    RECOMPUTES,
    WRAP,
    Fsdp,
    by_short_names,
    keep_recomputation,
    launched_config,
    read_fsdp,
    sharding_notes,
)
from bexp.explorer.trainers.keys import UNKNOWN_FIELD, Batch, Why, words
from bexp.explorer.trainers.trainer import LIBRARY_RUNS_IT, MUON_WITH_EXPERTS, OTHER_LIBRARIES, Trainer, expresses

FILE = "accelerate"
"""The field of a document that holds the configuration."""


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the YAML."""
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(settings),
        "num_processes": settings.num_devices,
        "mixed_precision": HALF_NAMES[settings.dtype] if settings.has_autocast else "no",
        "use_cpu": settings.device_kind == "cpu",
    }
    if (config := launched_config(settings)) is not None:
        recomputes = settings.recompute is Recompute.FULL
        named = {"version": 2, "auto_wrap_policy": WRAP, **config, RECOMPUTES: recomputes}
        values["fsdp_config"] = {f"{PREFIX}{name}": value for name, value in named.items()}
    if uses_deepspeed(settings):
        values["deepspeed_config"] = {"zero_stage": settings.sharding.level}
    if settings.compiled_layers:
        values["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    return yaml_export(settings, values, [*script_notes(settings, "Accelerator"), *sharding_notes(settings)])


def _distributed_type(settings: TrainerSettings) -> str:
    if uses_deepspeed(settings):
        return "DEEPSPEED"
    if settings.num_devices == 1:
        return "NO"
    if settings.sharding is not Sharding.NONE:
        return "FSDP"
    return "MULTI_CPU" if settings.device_kind == "cpu" else "MULTI_GPU"


_TYPES = words("no multi_gpu multi_cpu fsdp deepspeed")
_HARMLESS = words(
    """
    compute_environment debug downcast_bf16 enable_cpu_affinity machine_rank main_training_function rdzv_backend
    same_network tpu_env tpu_use_cluster tpu_use_sudo use_cpu gpu_ids main_process_ip main_process_port mpirun_config
    """
)
"""How processes are started, and TPUs, which other keys would turn on."""
_KEPT = words("distributed_type num_processes mixed_precision fsdp_config deepspeed_config dynamo_config")
"""What decides the training. It is kept with a request, to say what else an answer changes."""
_REFUSED = {
    "fp8_config": "float8 of accelerate is not measured: remove it",
    "megatron_lm_config": "accelerate's Megatron is not measured: give Megatron's flags, or remove it",
    "tpu_name": "TPUs are not measured: remove it",
    "commands": "remote commands are not read: remove it",
    "command_file": "remote commands are not read: remove it",
}
_HARMLESS_OF_DEEPSPEED = words(
    """
    deepspeed_multinode_launcher gradient_clipping zero3_init_flag zero3_save_16bit_model offload_optimizer_nvme_path
    offload_param_nvme_path deepspeed_moe_layer_cls_names seq_parallel_communication_data_type
    """
)
_HARMLESS_OF_COMPILER = words("use_dynamic use_fullgraph use_regional_compilation")
_OF_DEEPSPEED = "deepspeed_config_file"
"""The key of DeepSpeed's JSON, or of its path."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The processes that a configuration of `accelerate launch` starts."""

    location: Location
    num_processes: int | None
    half: bool | None
    """Whether they compute in bfloat16; None where the script decides."""
    fsdp: Fsdp | None
    deepspeed: Section | None
    """DeepSpeed's JSON."""


def processes_of(document: Any) -> Any:
    """Return the number of processes that a configuration states; None without one."""
    if not isinstance(document, Mapping):
        return None
    return 1 if str(document.get("distributed_type", "NO")).lower() == "no" else document.get("num_processes")


def read_launch(config: Section) -> Launch:
    """Read a configuration. What is not measured is refused at its key."""
    kind = str(config.get("distributed_type", "NO")).lower()
    if kind not in _TYPES:
        config.refuse("distributed_type", f"{shortened(kind)} is not measured; these are: {', '.join(sorted(_TYPES))}")
    if config.integer("num_machines", 1) not in (None, 0, 1):
        reason = "exchanges between machines are not measured: say 1, with the num_processes of one machine"
        config.refuse("num_machines", reason)
    config.refuse_where_set(_REFUSED)
    layout = config.section("parallelism_config")
    for key, value in layout.values.items():
        if key.endswith("_size") and value not in (None, 1) and "dp_shard" not in key:
            layout.refuse(key, f"{Why.HYBRID if 'replicate' in key else Why.PARALLEL}: say 1")
    half = str(config.get("mixed_precision") or "no").lower()
    if half not in ("no", "bf16"):
        config.refuse("mixed_precision", f"{shortened(half)} is not measured: say bf16")
    sharded, engine = config.section("fsdp_config"), config.section("deepspeed_config")
    _read_compiler(config)
    config.ignore(_HARMLESS | _KEPT)
    config.refuse_unread(UNKNOWN_FIELD)
    config.translation.put(
        ("kept", FILE), {key: value for key, value in config.values.items() if key in _KEPT and value is not None}
    )
    return Launch(
        location=config.location,
        num_processes=1 if kind == "no" else config.integer("num_processes", largest=1 << 20),
        half=True if half == "bf16" else None,
        fsdp=read_fsdp(True, sharded, config.at("distributed_type"), (1, 2), launched=True) if kind == "fsdp" else None,
        deepspeed=_read_deepspeed(engine) if kind == "deepspeed" else None,
    )


def _read_compiler(config: Section) -> None:
    given = config.section("dynamo_config")
    keys = by_short_names(given, "dynamo_")
    compiler = config.translation.section({name: given.values[key] for name, key in keys.items()}, given.location)
    backend, outer = compiler.get("backend"), config.get("dynamo_backend")
    if None not in (backend, outer) and str(backend).lower() != str(outer).lower():
        config.refuse("dynamo_backend", "is another value of dynamo_config: keep one of them")
    backend = str(outer or backend or "no").lower()
    if backend == "no":
        return
    if backend != "inductor":
        given.refuse(keys.get("backend", "dynamo_backend"), "is measured with inductor alone")
    if (mode := compiler.get("mode", "default")) not in (None, "default"):
        given.refuse(keys["mode"], f"{shortened(mode)} is not measured: say default")
    compiler.ignore(_HARMLESS_OF_COMPILER)
    for name, value in compiler.values.items():
        if name not in compiler.read and not is_unset(value):
            given.refuse(keys[name], UNKNOWN_FIELD)
    config.translation.put(("execution",), "compile", given.at(keys.get("backend", "dynamo_backend")))


def _read_deepspeed(engine: Section) -> Section:
    """Return DeepSpeed's JSON, which accelerate reads from a file, or makes of keys of its own."""
    nested = engine.get(_OF_DEEPSPEED)
    if isinstance(nested, str):
        engine.refuse(_OF_DEEPSPEED, "is the path of a file: put its content here")
        return engine.translation.section({}, engine.at(_OF_DEEPSPEED))
    if isinstance(nested, Mapping):
        return engine.section(_OF_DEEPSPEED)
    for key in ("offload_optimizer_device", "offload_param_device"):
        if str(engine.get(key) or "none").lower() != "none":
            engine.refuse(key, OFFLOADING.replace("device: none", "none"))
    steps = engine.get("gradient_accumulation_steps", "auto")
    engine.ignore(_HARMLESS_OF_DEEPSPEED)
    json = {"zero_optimization": {"stage": engine.integer("zero_stage", 2, largest=3)}}
    engine.refuse_unread(UNKNOWN_FIELD)
    return engine.translation.section({**json, "gradient_accumulation_steps": steps}, engine.location)


def read_side_file(config: Section, devices: int, other: Batch | None) -> Batch | None:
    """Read a configuration next to a model, and to TrainingArguments if there are any, whose batch is `other`."""
    translation = config.translation
    launch = read_launch(config)
    shards = devices > 1 and launch.fsdp is not None and launch.fsdp.level is not Sharding.NONE
    if launch.fsdp is not None:
        translation.put(("training", "sharding"), launch.fsdp.level.value, config.at("distributed_type"))
        keep_recomputation(translation, launch.fsdp)
        if launch.fsdp.recomputes:
            translation.put(("base_recompute",), Recompute.FULL.value, config.at("fsdp_config"))
    said = translation.get("training", "precision")
    if said == "autocast" or (said is None and launch.half):
        widens = shards and not translation.get("training", "lora")
        source = translation.sources.get(("training", "precision"), config.at("mixed_precision"))
        translation.put(("training", "precision"), "master" if widens else "autocast", source)
    if launch.deepspeed is not None:
        return read_config(launch.deepspeed, devices, other)
    return other


ACCELERATE = Trainer(
    name="accelerate",
    title="accelerate",
    formats={"accelerate": render},
    side_file=(FILE, read_side_file),
    expresses=expresses(
        attention=LIBRARY_ATTENTION,
        experts=LIBRARY_EXPERTS,
        execution={Execution.EAGER, Execution.COMPILE},
        optimizer={OTHER_LIBRARIES, MUON, MUON_WITH_EXPERTS},
    ),
    targets=LIBRARY_RUNS_IT,
    has_deepspeed=True,
    widens_shards=True,
)
