"""The fields under `trainer:` of a Cerebras configuration: those that are read, and those that change nothing.

The fields are those of `Trainer` in Model Zoo release 2.10. Any other field is refused by name, because it may change
how the model is trained. The sections of data (`train_dataloader`, `val_dataloader`) are not listed: each data
processor has fields of its own, and apart from the batch and the sequence length they choose data.
"""

from __future__ import annotations

from collections.abc import Mapping

from bexp.explorer.model.translation import Section

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


def check_callback(entry: Section) -> None:
    """Refuse a callback that changes a training step, or that is not Model Zoo's own."""
    for name in entry.values:
        if name in REFUSED_CALLBACKS:
            entry.refuse(name, REFUSED_CALLBACKS[name])
        elif name not in CALLBACKS:
            entry.refuse(name, "is not a known callback; remove it if it changes no training step")
