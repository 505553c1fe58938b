"""The YAML of Cerebras Model Zoo: a run configuration (`runconfig`, `train_input`, `eval_input`) or a `trainer`.

Only fields that decide the micro-batch are read: the batch, the sequence length, the devices, BTA, the optimizer and
the model. If training and evaluation both ask for a micro-batch, training is explored unless `mode` says eval. A
micro-batch that is left out, null or `none` is a request's default. The answer is for Cerebras' own trainer, unless the
document or the command asks for what that trainer cannot express. `fp16_type: cbfloat16`, Cerebras' own format, is read
as bfloat16, which has the same size.

The fields are those of `Trainer` in Model Zoo release 2.10, and of `runconfig` before it. Any field that is neither
read nor known to change nothing is refused by name. In the sections of data, each data processor has fields of its own:
an unknown one is refused if its name is about sizes, and otherwise noted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bexp.explorer.formats.modelzoo import DTYPES, refuse_network
from bexp.explorer.model.spelling import shortened
from bexp.explorer.model.translation import Location, Section, Translation
from bexp.explorer.trainers.cerebras import BTA_FLAGS, MICRO_BATCH_FLAG
from bexp.explorer.trainers.keys import words

READ: Mapping[str, frozenset[str]] = {
    "trainer": frozenset({"init", "fit", "validate"}),
    "trainer.init": frozenset({"backend", "model", "optimizer", "precision", "callbacks", "sparsity"}),
    "trainer.init.backend": frozenset({"cluster_config"}),
    "trainer.init.backend.cluster_config": frozenset({"num_csx"}),
    "trainer.fit": frozenset({"train_dataloader", "val_dataloader"}),
    "trainer.validate": frozenset({"val_dataloader"}),
}
"""The fields of each section that are read."""

IGNORED: Mapping[str, frozenset[str]] = {
    "trainer": words("validate_all"),
    "trainer.init": words("device model_dir schedulers loop checkpoint logging loggers seed autorestart"),
    "trainer.init.backend": words("backend_type compile_dir compile_only validate_only"),
    "trainer.init.backend.cluster_config": words(
        "mgmt_address mgmt_namespace credentials_path max_wgt_servers max_act_per_csx num_workers_per_csx "
        "num_act_servers disable_version_check job_labels job_priority mount_dirs python_paths transfer_processes "
        "workflow_id"
    ),
    "trainer.fit": words("ckpt_path"),
    "trainer.validate": words("ckpt_path loop"),
}
"""The fields of each section that change neither time nor memory of a training step."""

CALLBACKS = words(
    """
    GlobalFlags ScopedTrainFlags ScopedValidateFlags ScopedEleutherEvalHarnessFlags
    ScopedBigCodeEvalHarnessFlags EleutherEvalHarness BigCodeEvalHarness CheckLoss ComputeNorm ComputeNormGNS
    CountParams DumpAvailableTensorNames NaNChecker DurationProfiler FlopUtilization RateProfiler
    SavePerformanceData SamplesStreamedInfo LogInputSummaries LogOptimizerParamGroup LogSparsity
    ModelEvalMetrics DebugArgsPath NormTensorListener SummaryTensorListener ModelZooParamsMetadata OpProfiler
    KeepNCheckpoints LoadCheckpointStates SaveCheckpointState SkipSamples HFCacheDir GlobalPerturbations
    Reproducibility WeightCompression
    """
)
"""The callbacks of Model Zoo that leave a training step as it is: flags, evaluations, records and files."""

REFUSED_CALLBACKS: Mapping[str, str] = {
    "Lora": "low-rank adapters are read from training.lora only, for target transformers",
    "SelectiveGrad": "frozen parameters are not supported",
    "DumpActivations": "a run that writes its activations is not like training",
}

RUNCONFIG_READ = words("num_csx use_cs_grad_accum")
RUNCONFIG_IGNORED = words(
    """
    mode max_steps num_epochs num_steps steps_per_epoch eval_steps eval_frequency checkpoint_steps checkpoint_path
    is_pretrained_checkpoint autoload_last_checkpoint disable_strict_checkpoint_loading load_checkpoint_states
    save_initial_checkpoint keep_checkpoints model_dir compile_dir summary_dir seed log_steps log_initial_summaries
    logging enable_summaries save_losses check_loss_values compile_only validate_only credentials_path mgmt_address
    mgmt_namespace num_workers_per_csx num_act_servers num_wgt_servers max_wgt_servers max_act_per_csx
    transfer_processes job_labels job_priority job_time_sec debug_args_path disable_version_check mount_dirs
    python_paths
    precision_opt_level target_device wsc_log_level compile_crd_memory_gi execute_crd_memory_gi
    wrk_memory_gi act_memory_gi cmd_memory_gi wgt_memory_gi lazy_initialization drop_data retrace_every_iteration
    enable_act_frequency op_profiler_config
    """
)
"""The number of steps, files, records, and the hosts of a Cerebras cluster."""
DATA_READ = words("batch_size micro_batch_size max_sequence_length")
DATA_IGNORED = words(
    """
    data_processor data_dir shuffle shuffle_seed shuffle_buffer num_workers prefetch_factor persistent_workers
    drop_last repeat vocab_size vocab_file vocab_path encoder_file add_special_tokens do_lower lowercase buckets
    use_worker_cache num_samples num_examples pad_last n_samples sort_files mixture features_list features_size
    mixed_precision fp16_type dataset_map_fn pos_token inv_token eos_id pad_id input_pad_id labels_pad_id
    attn_mask_pad_id ignore_index use_multiple_workers
    """
)
"""The choice and the order of data, and how they are loaded."""
OF_SIZE = re.compile("batch|seq|len|pack|accum|csx|vsl")
"""Unknown fields of data with such a name may change the shape of a batch."""
UNKNOWN = "is not a known field; remove it if it changes no training step"

TRAINER_MARKS = frozenset({"init", "fit", "validate", "validate_all"})


def check_trainer(trainer: Section) -> None:
    """Refuse each field of the sections under `trainer` that is not known to change nothing, and is not read."""
    if trainer.values and not TRAINER_MARKS & trainer.values.keys():
        unknown = ", ".join(map(str, list(trainer.values)[:6]))
        trainer.translation.refuse(
            trainer.location,
            f"is not the trainer of a Cerebras Model Zoo YAML (fit, init): it has {unknown}; remove it, and say "
            "num_devices, batch_size and training.sharding instead",
        )
        return
    for path, read in READ.items():
        section = trainer
        for key in path.split(".")[1:]:
            section = section.section(key)
        known = IGNORED[path]
        for key in section.values:
            if key not in read and key not in known:
                section.refuse(key, f"is not a known field; known: {', '.join(sorted({*read, *known}))}")


def check_data(data: Section) -> None:
    """Refuse an unknown field of a section of data if its name is about sizes; note others."""
    unknown = [str(key) for key in data.values if key not in DATA_READ | DATA_IGNORED]
    for key in filter(OF_SIZE.search, unknown):
        data.refuse(key, UNKNOWN)
    data.translation.note_unknown([key for key in unknown if not OF_SIZE.search(key)])


def check_callback(entry: Section) -> None:
    """Refuse a callback that changes a training step, or that is not Model Zoo's own."""
    for name in entry.values:
        if name in REFUSED_CALLBACKS:
            entry.refuse(name, REFUSED_CALLBACKS[name])
        elif name not in CALLBACKS:
            entry.refuse(name, "is not a known callback; remove it if it changes no training step")


RUN_KEYS = ("runconfig", "train_input", "eval_input", "trainer", "optimizer", "model")
MARKS = frozenset(RUN_KEYS[:4])
"""A document with any of these keys at the top is a Cerebras configuration."""


def is_cerebras(document: Mapping[str, Any]) -> bool:
    """Return whether a document is a Cerebras configuration; `trainer` as a text names the trainer of a request."""
    marks = MARKS & document.keys()
    return bool(marks - {"trainer"}) or ("trainer" in marks and not isinstance(document["trainer"], str | None))


BEYOND_CEREBRAS = frozenset(
    {
        *("trainer", "recompute", "attention_backends", "expert_backends", "execution", "executions", "losses"),
        *("kernels", "sharding_levels", "context_parallel", "parallelism", "capacity_factors", "target"),
    }
)
"""Fields of a request that Cerebras' trainer cannot express."""
SCOPES = {"GlobalFlags": ("train", "eval"), "ScopedTrainFlags": ("train",), "ScopedValidateFlags": ("eval",)}

OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd"}

Found = tuple[Location, Any]


@dataclass
class _Pass:
    """The batch and the micro-batch of training, or of evaluation, with their locations."""

    batch: Found | None = None
    micro_batch: Found | None = None
    seq_length: Found | None = None


def translate_run(document: Mapping[str, Any], translation: Translation, mode: str | None) -> Found | None:
    """Set everything but the model, and return the model's section with its location, if the document has one."""
    top = translation.section(document, ())
    if isinstance(document.get("trainer"), list | tuple):
        top.refuse("trainer", "a list of trainers is not supported: keep one")
        return None
    if refuse_network(_find_model(top)):
        return None
    passes = {"train": _Pass(), "eval": _Pass()}
    run = top.section("runconfig")
    for name, key in (("train", "train_input"), ("eval", "eval_input")):
        _read_data(top, key, passes[name])
    devices: Found | None = (run.at("num_csx"), run.get("num_csx")) if "num_csx" in run else None
    run.ignore(RUNCONFIG_READ | RUNCONFIG_IGNORED)
    run.refuse_unread(UNKNOWN)
    trainer = top.section("trainer")
    check_trainer(trainer)
    init = trainer.section("init")
    cluster = init.section("backend").section("cluster_config")
    if "num_csx" in cluster:
        devices = (cluster.at("num_csx"), cluster.get("num_csx"))
    if "trainer" in top:
        _read_data(trainer.section("fit"), "train_dataloader", passes["train"])
        _read_data(trainer.section("fit"), "val_dataloader", passes["eval"])
        _read_data(trainer.section("validate"), "val_dataloader", passes["eval"])
    _read_flags(init, passes, translation)
    mode = mode or document.get("mode") or _choose_mode(passes)
    chosen = passes.get(str(mode), _Pass())
    translation.put(("mode",), mode)
    for target, stated in (
        ("batch_size", chosen.batch),
        ("num_devices", devices),
        ("micro_batch_size", chosen.micro_batch),
        ("model.seq_length", chosen.seq_length),
    ):
        if stated is not None and stated[1] is not None:
            translation.put(tuple(target.split(".")), stated[1], stated[0])
    if "runconfig" in top and chosen.micro_batch is not None:
        _check_accumulation(run, chosen.micro_batch)
    _read_optimizer(top, init, translation)
    _read_precision(init, translation)
    for section in (top, init):
        if section.values.get("sparsity") is not None:
            section.refuse("sparsity", "sparse weights are not supported")
    if init.values.get("model") is not None:
        return init.at("model"), init.get("model")
    if "model" in top:
        return top.at("model"), top.get("model")
    if not translation.problems:
        translation.refuse(init.at("model") if "trainer" in top else ("model",), "the model is missing")
    return None


def _find_model(top: Section) -> Section:
    """Return the section of the model, empty if there is none."""
    trainer = top.values.get("trainer")
    init = trainer.get("init") if isinstance(trainer, Mapping) else None
    model = init.get("model") if isinstance(init, Mapping) else None
    location: Location = ("trainer", "init", "model")
    if model is None:
        model, location = top.values.get("model"), ("model",)
    return Section(top.translation, model if isinstance(model, Mapping) else {}, location)


def _read_data(parent: Section, key: str, data: _Pass) -> None:
    if isinstance(parent.values.get(key), list | tuple):
        parent.refuse(key, "several inputs are not supported: keep one")
        return
    section = parent.section(key)
    check_data(section)
    if "batch_size" in section:
        data.batch = (section.at("batch_size"), section.get("batch_size"))
    if not _is_left_out(section.get("micro_batch_size")):
        data.micro_batch = (section.at("micro_batch_size"), section.get("micro_batch_size"))
    if section.get("max_sequence_length") is not None:
        data.seq_length = (section.at("max_sequence_length"), section.get("max_sequence_length"))


def _read_flags(init: Section, passes: Mapping[str, _Pass], translation: Translation) -> None:
    callbacks = init.get("callbacks") or []
    if not isinstance(callbacks, list | tuple):
        init.refuse("callbacks", "must be a list")
        return
    unknown: list[str] = []
    for index, callback in enumerate(callbacks):
        entry = translation.section(callback, (*init.at("callbacks"), index))
        check_callback(entry)
        for scope, names in SCOPES.items():
            if scope not in entry:
                continue
            for flag, stated in _flatten(entry.get(scope), entry.at(scope)).items():
                if flag in BTA_FLAGS:
                    translation.put(("bta", BTA_FLAGS[flag]), stated[1], stated[0])
                elif flag == MICRO_BATCH_FLAG:
                    for name in () if _is_left_out(stated[1]) else names:
                        passes[name].micro_batch = stated
                elif "bta" in flag.lower() or "ws_opt" in flag:
                    known = f"known: {', '.join(BTA_FLAGS)}; remove it if it changes no training step"
                    translation.refuse(stated[0], f"is not a known flag; {known}")
                else:
                    unknown.append(flag)
    translation.note_unknown(unknown)
    if str(translation.get("bta", "enable")).lower() == "false" and translation.get("bta", "max_tile") is not None:
        translation.ignored.append(translation.sources["bta", "max_tile"])  # the cap of a tiling that is switched off
        translation.put(("bta", "max_tile"), None)


def _is_left_out(micro_batch: Any) -> bool:
    return micro_batch is None or str(micro_batch).lower() == "none"


def _flatten(value: Any, location: Location, name: str = "") -> dict[str, Found]:
    """Return flags by their full dotted names, for nested and for dotted ones."""
    if name == MICRO_BATCH_FLAG or not isinstance(value, Mapping):
        return {name: (location, value)}
    flags: dict[str, Found] = {}
    for key, inner in value.items():
        flags |= _flatten(inner, (*location, key), f"{name}.{key}" if name else str(key))
    return flags


def _choose_mode(passes: Mapping[str, _Pass]) -> str:
    def explores(data: _Pass) -> bool:
        return data.micro_batch is not None and not isinstance(data.micro_batch[1], int)

    def exists(data: _Pass) -> bool:
        return data.batch is not None or data.micro_batch is not None

    train, evaluation = passes["train"], passes["eval"]
    if explores(train) or explores(evaluation):
        return "train" if explores(train) else "eval"
    return "eval" if exists(evaluation) and not exists(train) else "train"


def _check_accumulation(run: Section, micro_batch: Found) -> None:
    choice = micro_batch[1]
    if (choice == "explore" or isinstance(choice, Mapping)) and not run.boolean("use_cs_grad_accum"):
        run.refuse(
            "use_cs_grad_accum", "must be true to explore the micro-batch: without gradient accumulation it is fixed"
        )


def _read_precision(init: Section, translation: Translation) -> None:
    """Read a trainer's precision, which overrides the model's own, deprecated `fp16_type`."""
    precision = init.section("precision")
    if "enabled" in precision and not precision.boolean("enabled"):
        translation.put(("model", "dtype"), "float32", precision.at("enabled"))
    elif "fp16_type" in precision:
        dtype = precision.choice("fp16_type", DTYPES, "bfloat16")
        translation.put(("model", "dtype"), dtype, precision.at("fp16_type"))


def _read_optimizer(top: Section, init: Section, translation: Translation) -> None:
    optimizer = top.section("optimizer")
    name, location = optimizer.get("optimizer_type"), optimizer.at("optimizer_type")
    nested = init.section("optimizer")
    if nested.values:
        name = next(iter(nested.values))
        location = nested.at(str(name))
    if name is None:
        return
    known = OPTIMIZERS.get(str(name).lower())
    if known is None:
        translation.refuse(location, f"the optimizer {shortened(repr(name))} is not supported; supported: AdamW, SGD")
    else:
        translation.put(("training", "optimizer", "name"), known, location)
