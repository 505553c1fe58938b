"""Tries every causal language model type of the installed transformers at a tiny size on the CPU.

    python -m benchmarks.model_survey [--processes 2] [--again TYPE ...]

It writes docs/models.json and docs/models.md. Rows that are there for the same versions are kept unless `--again` names
them, so an interrupted run goes on. Each type has a process of its own, which may crash or hang.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from benchmarks.environment import ROOT
from bexp.transformers.experts import expert_modules
from bexp.workers.targets.transformers.config import (
    UnsupportedModelError,
    library_version,
    one_line,
    quiet_library,
    resolve_config,
)
from bexp.workers.targets.transformers.kinds import find_layers, kind_names
from bexp.workers.targets.transformers.model import META, BuildSettings, build_model
from bexp.workers.targets.transformers.self_check import FEATURES, self_check
from bexp.workers.targets.transformers.shrink import TINY_SEQ_LENGTH, tiny_config

DATA, PAGE = ROOT / "docs" / "models.json", ROOT / "docs" / "models.md"
DEADLINE_SECONDS = 300.0
"""For one type, with the imports of torch and transformers on a busy machine."""
# Each of these types fails to build or to run with its class's defaults alone.
_MISSING_DEFAULTS: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 48], "max_position_embeddings": 16},
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_survey", description="Tries every model type.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--again", nargs="*", default=None, help="types to try again; none named: all")
    parser.add_argument("--only", metavar="TYPE", help="print the row of one type, and write nothing")
    options = parser.parse_args(arguments)
    if options.only is not None:
        torch.set_num_threads(1)
        print(json.dumps(survey_type(options.only)))
        return 0
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415 - is optional

    versions = {"transformers": library_version(), "torch": torch.__version__}
    document = json.loads(DATA.read_text())
    rows: dict[str, Any] = document["models"] if document["versions"] == versions else {}
    types = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    again = set(types if options.again == [] else options.again or ())
    with ThreadPoolExecutor(options.processes) as threads:
        tried = [threads.submit(try_apart, name) for name in types if name not in rows or name in again]
        for each in as_completed(tried):
            row = each.result()
            rows[row.pop("model_type")] = row
            DATA.write_text(json.dumps({"versions": versions, "models": dict(sorted(rows.items()))}, indent=1) + "\n")
            print(f"{len(rows)} of {len(types)}", file=sys.stderr)
    PAGE.write_text(render(json.loads(DATA.read_text())))
    return 0


def try_apart(name: str) -> dict[str, Any]:
    """Return the row of a type from a process of its own; one that says so if that is late or dies."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.model_survey", "--only", name]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, timeout=DEADLINE_SECONDS, check=True)
    except subprocess.TimeoutExpired:
        reason = f"took longer than {DEADLINE_SECONDS:.0f} s"
    except subprocess.CalledProcessError as error:
        reason = f"the process ended with status {error.returncode}"
    else:
        row: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return row
    return {"model_type": name, "status": "not", "reason": reason}


def survey_config(model_type: str) -> dict[str, Any]:
    """A raw configuration of `model_type`: its class's defaults, as a decoder, with what they lack.

    UnsupportedModelError if the defaults cannot be made.
    """
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - transformers is optional

    raw: dict[str, Any] = {"model_type": model_type, **_MISSING_DEFAULTS.get(model_type, {})}
    try:
        with quiet_library():
            defaults = CONFIG_MAPPING[model_type]()
    except Exception as error:  # a configuration's own checks raise errors of any kind
        raise UnsupportedModelError(f"the class's defaults are refused: {one_line(error)}") from error
    if getattr(defaults, "is_decoder", None) is False:
        raw["is_decoder"] = True
    return raw


def survey_type(model_type: str) -> dict[str, Any]:
    """What one type can do: its class, whether it runs by parts, whole or not, and why a feature is missing."""
    started = time.monotonic()
    row: dict[str, Any] = {"model_type": model_type, "status": "not"}
    try:
        row |= _checked(model_type)
    except UnsupportedModelError as error:
        row["reason"] = error.reason
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises is the row's reason
        row["reason"] = one_line(error)
    row["seconds"] = round(time.monotonic() - started, 1)
    return row


def _checked(model_type: str) -> dict[str, Any]:
    resolved = resolve_config(survey_config(model_type), TINY_SEQ_LENGTH)
    row: dict[str, Any] = {"model_class": resolved.model_class.__name__}
    kinds: list[str] = []
    try:
        meta = build_model(resolved, BuildSettings(), META)
        kinds = kind_names(find_layers(meta), meta.config)
    except UnsupportedModelError as error:
        row["defaults"] = error.reason  # a class whose defaults fail may still build at small sizes
    tiny = tiny_config(resolved, kinds)
    check = self_check(tiny)
    row["failures"] = dict(check.failures)
    if not check.runs:
        return row | {"status": "not", "reason": check.failures["runs"]}
    model = build_model(tiny, BuildSettings(), META)
    row["kinds"] = list(dict.fromkeys(check.kinds))
    row["features"] = [name for name in FEATURES if name not in check.failures]
    row["has_experts"] = bool(expert_modules(model))
    row["tied_weights"] = _is_tied(model)
    return row | {"status": "parts" if check.by_parts else "whole"}


def _is_tied(model: Any) -> bool:
    everything = len(list(model.named_parameters(remove_duplicate=False)))
    return everything > len(list(model.named_parameters()))


if __name__ == "__main__":
    sys.exit(main())


_HEADINGS = {
    "parts": "Measured by parts",
    "whole": "Not measured by parts",
    "not": "Not measured",
}
_ABOUT = {
    "parts": "One layer of each kind, and the shell around the layers, compute what the whole model computes: outputs "
    "and every gradient are equal in float32, at micro-batches of 1 and 2.",
    "whole": "The model trains, but its parts do not add up to it, so an exploration ends with `unsupported`. Measure "
    "it whole with `examples/targets/hugging_face.py`: see [Targets](targets.md#any-other-model-of-transformers).",
    "not": "The model does not train at a tiny size on the CPU.",
}
_LONGEST_REASON = 70


def render(document: Mapping[str, Any]) -> str:
    rows: Mapping[str, Mapping[str, Any]] = document["models"]
    counts = Counter(row["status"] for row in rows.values())
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        "# Causal language models of transformers",
        "",
        f"Generated from `models.json` ({versions}) by `python -m benchmarks.model_survey`. Do not edit.",
        "",
        f"The library knows {len(rows)} types. {counts['parts']} are measured by parts, {counts['whole']} train but "
        f"have no such parts, {counts['not']} do not train at all. Each was built from its class's defaults at a "
        "tiny size. `models.json` has every reason in full.",
        "",
    ]
    for status, heading in _HEADINGS.items():
        chosen = {name: row for name, row in rows.items() if row["status"] == status}
        lines += [f"## {heading} ({len(chosen)})", "", _ABOUT[status], ""]
        lines += _names(chosen) if status == "parts" else _reasons(chosen)
    return "\n".join(lines + _missing(rows))


def _names(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The types by what they have for experts: `bexp.apply` sets expert back ends through the library's interface."""
    served = {name: "experts_interface" in row["features"] for name, row in rows.items()}
    kinds = {True: "With the library's experts interface", False: "Without experts that take this interface"}
    return [
        line
        for kind, title in kinds.items()
        for line in (f"{title}: {', '.join(name for name, support in served.items() if support is kind)}.", "")
    ]


def _reasons(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [f"- {name}: {_escaped(_reason(row))}" for name, row in rows.items()]
    return [*lines, ""]


def _reason(row: Mapping[str, Any]) -> str:
    if "reason" in row:
        return str(row["reason"])
    failures: Mapping[str, str] = row["failures"]
    return next(reason for reason in failures.values() if not reason.startswith("needs "))


def _missing(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lacking = defaultdict(list)
    for name, row in rows.items():
        for feature in row["failures"] if row["status"] == "parts" else ():
            if feature != "experts_interface" or row["has_experts"]:
                lacking[feature.replace("_", " ")].append(name)
    lines = [f"- {feature}: {', '.join(names)}" for feature, names in lacking.items()]
    return ["## Missing features", "", "All other types have them.", "", *lines, ""]


def _escaped(text: str) -> str:
    text = " ".join(text.split())
    text = text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON].rsplit(' ', 1)[0]} ..."
    return text.replace("<", "&lt;")
