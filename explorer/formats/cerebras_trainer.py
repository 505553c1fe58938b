"""The fields of a Cerebras configuration: those that are read, and those that change nothing.

The fields are those of `Trainer` in Model Zoo release 2.10, and of `runconfig` before it. Any other field is refused by
name, because it may change how the model is trained. In the sections of data, each data processor has fields of its
own: an unknown one is refused if its name is about sizes, and otherwise noted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bexp.explorer.model.translation import Section
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

IGNORED: Mapping[str, Mapping[str, str]] = {
    "trainer": {"validate_all": "repeats the validation of other checkpoints"},
    "trainer.init": {
        "device": "the exploration runs on the devices of a worker",
        "model_dir": "where files are written",
        "schedulers": "values of the learning rate",
        "loop": "the number of steps",
        "checkpoint": "when files are written",
        "logging": "what is printed",
        "loggers": "what is printed",
        "seed": "random values",
        "autorestart": "what happens after a fault",
    },
    "trainer.init.backend": {
        "backend_type": "the exploration runs on the devices of a worker",
        "compile_dir": "where files are written",
        "compile_only": "whether the run stops before its first step",
        "validate_only": "whether the run stops before its first step",
    },
    "trainer.init.backend.cluster_config": dict.fromkeys(
        (
            *("mgmt_address", "mgmt_namespace", "credentials_path", "max_wgt_servers", "max_act_per_csx"),
            *("num_workers_per_csx", "num_act_servers", "disable_version_check", "job_labels", "job_priority"),
            *("mount_dirs", "python_paths", "transfer_processes", "workflow_id"),
        ),
        "the hosts of a Cerebras cluster",
    ),
    "trainer.fit": {"ckpt_path": "values of parameters"},
    "trainer.validate": {"ckpt_path": "values of parameters", "loop": "the number of steps"},
}
"""The fields of each section that change neither time nor memory of a training step, with their meaning."""

CALLBACKS: Mapping[str, str] = {
    **dict.fromkeys(("GlobalFlags", "ScopedTrainFlags", "ScopedValidateFlags"), "flags; those that matter are read"),
    **dict.fromkeys(
        ("ScopedEleutherEvalHarnessFlags", "ScopedBigCodeEvalHarnessFlags"), "flags of an evaluation during training"
    ),
    **dict.fromkeys(("EleutherEvalHarness", "BigCodeEvalHarness"), "an evaluation during training"),
    **dict.fromkeys(
        (
            *("CheckLoss", "ComputeNorm", "ComputeNormGNS", "CountParams", "DumpAvailableTensorNames", "NaNChecker"),
            *("DurationProfiler", "FlopUtilization", "RateProfiler", "SavePerformanceData", "SamplesStreamedInfo"),
            *("LogInputSummaries", "LogOptimizerParamGroup", "LogSparsity", "ModelEvalMetrics", "DebugArgsPath"),
            *("NormTensorListener", "SummaryTensorListener", "ModelZooParamsMetadata", "OpProfiler"),
        ),
        "what is recorded of a run",
    ),
    **dict.fromkeys(
        (
            *("KeepNCheckpoints", "LoadCheckpointStates", "SaveCheckpointState", "SkipSamples", "HFCacheDir"),
            *("GlobalPerturbations", "Reproducibility", "WeightCompression"),
        ),
        "files, and where a run begins",
    ),
}
"""The callbacks of Model Zoo that leave a training step as it is, with their meaning."""

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

MARKS = frozenset({"init", "fit", "validate", "validate_all"})


def check_trainer(trainer: Section) -> None:
    """Refuse each field of the sections under `trainer` that is not known to change nothing, and is not read."""
    if trainer.values and not MARKS & trainer.values.keys():
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


def check_runconfig(run: Section) -> None:
    """Refuse each field of `runconfig` that is not known to change nothing, and is not read."""
    run.ignore(RUNCONFIG_READ | RUNCONFIG_IGNORED)
    run.refuse_unread(UNKNOWN)


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
