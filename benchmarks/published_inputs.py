"""Holds what bexp promises for published training inputs against what their trainers then run.

    python -m benchmarks.published_inputs --inputs FOLDER --out FILE
    python -m benchmarks.published_inputs axolotl --inputs FOLDER --tiny --device cpu --out FILE

An input is a script with its command, or a YAML, as its project publishes it; the names of models and datasets stand
for those of `benchmarks.published_models`. FOLDER has the files that no package brings:

- `training_nli_v2.py`, `matryoshka_nli.py`: sentence-transformers v6.0.0, examples/sentence_transformer/training
- `lora-1b.yml`, `mistral.yml`: Axolotl v0.18.0, examples/llama-3 and examples/mistral/config.yml
- `qwen3_lora_sft.yaml`: LLaMA-Factory v0.9.5, examples/train_lora

`bexp tune` measures a script, and `bexp explore` and `bexp best --into` change a YAML. Then the trainer runs with the
answer, without bexp, and `benchmarks/observer` counts and times it from within. First of all, the input runs as
published, which also brings its files into memory. An input that fails is recorded with the end of its output, and the
next one is tried. Rows of other inputs in an existing FILE are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from benchmarks.environment import ROOT, describe_commit, describe_environment, write_results
from benchmarks.published_agreement import Row, agreement, promise_of

LAST_LINES = 40
CLIENT = (sys.executable, "-P", "-m", "bexp.api.cli")
SIZE, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
TINY_SFT = ("--max_length", "128", "--use_cpu", "true")
TINY = {
    ": 2048": ": 384",
    ": 8192": ": 384",
    "bf16: auto": "bf16: true",
    "adamw_bnb_8bit": "adamw_torch_fused",
    "[768, 512, 256, 128, 64]": "[64, 32]",
    "\nbatch_size = 128": "\nbatch_size = 8",
    "train_batch_size = 128": "train_batch_size = 8",
    "fp16=True": "fp16=False",
}
"""What is another text in files of tiny runs, which a CPU makes."""
SFT = """
trl/scripts/sft.py --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-5
--num_train_epochs 1 --packing --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --eos_token <|im_end|>
--eval_strategy steps --eval_steps 100 --output_dir Qwen2-0.5B-SFT
"""
"""The command in TRL's script, apart from `--push_to_hub`, which needs a hub."""
LORA = ("--learning_rate", "2.0e-4", "--use_peft", "--lora_r", "32", "--lora_alpha", "16")
PACKAGES = [
    *("torch", "transformers", "accelerate", "peft", "trl", "datasets", "sentence-transformers", "axolotl"),
    *("llamafactory", "bitsandbytes", "torchao", "tokenizers"),
]
VERSIONS = """
import json, sys
from importlib.metadata import distributions
found = {each.name: each.version for each in reversed(list(distributions()))}  # the first on the path is imported
print(json.dumps({name: found.get(name) for name in sys.argv[1:]}))
"""
WIDTHS = """
import json, sys
from bexp.api.cli.connection import open_stored
with open_stored() as stored:
    job, chosen = sys.argv[1], json.loads(sys.argv[2])
    trials = [each for each in stored.trials(job) if each.candidate.model_dump(mode="json") == chosen]
    runs = [run for trial in trials for run in trial.measurement.components if run.new_width_share is not None]
print(json.dumps([[run.new_width_seconds, run.new_width_share] for run in runs]))
"""
"""Prints what a new width takes in each trial of a candidate, and the share of micro-batches with one."""


@dataclass(frozen=True)
class Published:
    """A published input. `file` is its script or YAML, in a package or in the folder of inputs; `model` is made for it.

    `explored` are options of `bexp explore` for what the file does not say. The run has no key of `dropped`, and
    `replaced` texts of the file are others here.
    """

    file: str
    model: str
    arguments: tuple[str, ...] = ()
    trainer: str | None = None
    program: tuple[str, ...] = ()
    tiny: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    explored: tuple[str, ...] = ()
    replaced: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


AXOLOTL: dict[str, Any] = {
    "trainer": "axolotl",
    "program": ("-m", "axolotl.cli.train"),
    "replaced": {"attn_implementation: flash_attention_2": "attn_implementation: sdpa"},  # no wheel of flash-attn
    "environment": {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "WANDB_MODE": "disabled"},
}
INPUTS = {
    "trl": Published("trl/scripts/sft.py", "Qwen/Qwen2-0.5B", (*SFT.split()[1:],), tiny=TINY_SFT),
    "trl, LoRA": Published("trl/scripts/sft.py", "Qwen/Qwen2-0.5B", (*SFT.split()[1:], *LORA), tiny=TINY_SFT),
    "axolotl": Published(
        "lora-1b.yml",
        "NousResearch/Llama-3.2-1B",
        explored=("--lengths", "teknium/GPT4-LLM-Cleaned/lengths.txt"),
        dropped=("loss_watchdog_threshold",),  # it ends a training whose weights are random
        **AXOLOTL,
    ),
    "axolotl, 7 B": Published(
        "mistral.yml",
        "mistralai/Mistral-7B-v0.1",
        explored=("--lengths", "mhenrichsen/alpaca_2k_test/lengths.txt"),
        **AXOLOTL,
    ),
    "llamafactory": Published(
        "qwen3_lora_sft.yaml",
        "Qwen/Qwen3-4B-Instruct-2507",
        trainer="llamafactory",
        program=("-m", "llamafactory.cli", "train"),
        dropped=("warmup_ratio",),  # transformers has it no more
        environment={"DISABLE_VERSION_CHECK": "1"},
    ),
    "sentence-transformers": Published("training_nli_v2.py", "distilbert/distilroberta-base"),
    "sentence-transformers, 1.7 B": Published("matryoshka_nli.py", "Qwen/Qwen3-1.7B", ("Qwen/Qwen3-1.7B",)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each input, and return how many did not run to the end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published_inputs", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(INPUTS)}")
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2, help="runs of a command with its answer")
    parser.add_argument("--libraries", type=Path, help="has a folder of packages for each trainer that needs others")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="an empty folder for models and outputs; default: a temporary one")
    parser.add_argument("--device", default="cuda:0", help="cuda:0 or cpu")
    parser.add_argument("--max-seconds", type=int, default=50, help="of the trials of an input")
    parser.add_argument("--case-seconds", type=float, default=130.0, help="of an input in all")
    parser.add_argument("--end-after", type=float, default=570.0, help="begin no input that could end after these")
    parser.add_argument("--steps", type=int, default=20, help="of the optimizer that are timed, after --warm-up ones")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="tiny models and short texts, to try this out")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    environment = describe_environment() | {"device": _device()}
    results: Row = json.loads(options.out.read_text()) if options.out.exists() else {"inputs": {}}
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        bench = Bench(options, work)
        bench.make_models({INPUTS[name].model for name in options.names or INPUTS})
        for name in options.names or INPUTS:
            left = options.end_after - (time.monotonic() - began)
            row: Row = {"commit": describe_commit(), "environment": environment}
            results["inputs"][name] = row
            try:
                if left < options.case_seconds / 2:
                    row["error"] = "no time was left"
                else:
                    bench.run(name, INPUTS[name], row, min(options.case_seconds, left))
            except Exception as error:  # noqa: BLE001 - whatever a trainer or a package raises, the next input is tried
                row["error"] = f"{type(error).__name__}: {error}"[:6000]
            print(f"{name}: {json.dumps(row.get('agreement') or row.get('error'))}", flush=True)
            write_results(options.out, results)
    return sum("error" in row for row in results["inputs"].values())


class Bench:
    """Runs inputs in a folder with all that they name."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self._options = options
        self._work = work
        self._ends_at = float("inf")
        self._log: list[Row] = []

    def make_models(self, names: Collection[str]) -> None:
        """Make models and texts."""
        self._work.mkdir(parents=True, exist_ok=True)
        tiny = ["--tiny"] if self._options.tiny else []
        self._start([sys.executable, "-m", "benchmarks.published_models", str(self._work), *sorted(names), *tiny], {})

    def run(self, name: str, published: Published, row: Row, seconds: float) -> None:
        """Fill the row of an input: what is promised, what ran, and whether they agree."""
        self._ends_at, self._log = time.monotonic() + seconds, row.setdefault("log", [])
        libraries = self._options.libraries
        library = None if libraries is None else libraries.resolve() / name.partition(",")[0]
        given = published.environment | ({"LIBRARY": str(library)} if library is not None and library.exists() else {})
        row["versions"] = json.loads(self._start([sys.executable, "-c", VERSIONS, *PACKAGES], given))
        row["input"] = self._place(published)
        with tempfile.TemporaryDirectory(dir=self._work) as folder:
            own = {"BEXP_DATABASE_URL": f"sqlite:///{folder}/bexp.db", **given}
            row["own"] = self._observe(self._own_command(published), own, Path(folder))
            explore = self._tune if published.trainer is None else self._explore
            row["promise"], command = explore(published, own)
            row["command"] = [self._plain(each) for each in command]
            row["rounds"] = []
            while len(row["rounds"]) < self._options.rounds and self._has_time_for_another(row["rounds"]):
                row["rounds"].append(self._observe(command, own, Path(folder)))
        row["agreement"] = agreement(row["promise"], row["rounds"])
        unit = f"{row['promise']['unit']}_per_second"
        row["agreement"]["over_own"] = row["rounds"][0][unit] / row["own"][unit]

    def _has_time_for_another(self, rounds: Sequence[Row]) -> bool:
        """Whether a round as long as the last one would end in time; the first is always run."""
        return not rounds or time.monotonic() + float(self._log[-1]["seconds"]) < self._ends_at

    def _observe(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> Row:
        """Run a command, and return what was observed of it."""
        observed = folder / "observed.json"
        steps = {"OBSERVED_STEPS": str(self._options.steps), "OBSERVED_WARM_UP": str(self._options.warm_up)}
        self._start(command, {**environment, "OBSERVED": str(observed), **steps})
        found: Row = json.loads(observed.read_text())
        observed.unlink()
        return found

    def _own_command(self, published: Published) -> list[str]:
        """Return the command as it was published, but for the lines of a YAML that its run must lack."""
        if published.trainer is None:
            return self._script(published)
        own = self._work / f"own-{published.file}"
        own.write_text(_without((self._work / published.file).read_text(), published.dropped))
        return [sys.executable, *published.program, own.name]

    def _script(self, published: Published) -> list[str]:
        tiny = published.tiny if self._options.tiny else ()
        return [sys.executable, published.file, *published.arguments, *tiny]

    def _place(self, published: Published) -> Row:
        """Put the file of an input into the folder, and describe it."""
        source = self._options.inputs / Path(published.file).name
        if not source.exists():
            package, _, rest = published.file.partition("/")
            found = find_spec(package)
            source = Path((found and found.origin) or source).parent / rest
        path = self._work / published.file
        path.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text()
        described: Row = {"file": published.file, "sha256": hashlib.sha256(text.encode()).hexdigest()}
        described["replaced"] = published.replaced
        for old, new in {**published.replaced, **(TINY if self._options.tiny else {})}.items():
            text = text.replace(old, new)
        path.write_text(text)
        return described

    def _tune(self, published: Published, environment: Mapping[str, str]) -> tuple[Row, list[str]]:
        """Return what `bexp tune` promises for a script, and its command with the answer."""
        from bexp.api.cli.tuned_command import TunedCommand  # noqa: PLC0415 - late: a machine may lack its packages

        command = self._script(published)
        asked = ["--max-seconds", str(self._options.max_seconds), "--device", self._options.device]
        self._start([*CLIENT, "tune", *asked, "--", *command], environment)
        promise = self._promise(environment, format_of="trained weights")
        tuned = TunedCommand(command)
        values = {SIZE: promise["micro_batch_size"], STEPS: promise["grad_accum_steps"]}
        if not tuned.has_flag(SIZE) and promise["own_micro_batch_size"] != promise["micro_batch_size"]:
            raise LookupError(f"the script has another size than the answer: {promise}")
        return promise, tuned.with_flags(values)

    def _explore(self, published: Published, environment: Mapping[str, str]) -> tuple[Row, list[str]]:
        """Return what `bexp explore` promises for a YAML, and the trainer's command with the answer."""
        assert published.trainer is not None, "only a YAML of a trainer is explored"
        asked = ["--trainer", published.trainer, "--device", self._options.device]
        asked += ["--max-seconds", str(self._options.max_seconds)]
        self._start([*CLIENT, "explore", published.file, *published.explored, *asked], environment)
        promise = self._promise(environment, format_of="products")
        into = ["--format", published.trainer, "--into", published.file]
        text = self._start([*CLIENT, "best", "latest", *into], environment)
        tuned = self._work / f"tuned-{published.file}"
        tuned.write_text(_without(text, published.dropped))
        before, after = (yaml.safe_load(each) for each in ((self._work / published.file).read_text(), text))
        changes = {name: value for name, value in after.items() if name not in before or before[name] != value}
        promise |= {"changes": changes, "removed": sorted(before.keys() - after.keys())}
        promise["dropped_for_the_run"] = published.dropped
        return promise, [sys.executable, *published.program, tuned.name]

    def _promise(self, environment: Mapping[str, str], *, format_of: str) -> Row:
        """Return the promise of the newest exploration."""
        document = json.loads(self._start([*CLIENT, "best", "latest", "--json"], environment))
        promise = promise_of(document, format_of)
        candidate = json.dumps(promise["candidate"])
        seen = self._start([sys.executable, "-P", "-c", WIDTHS, document["job"]["id"], candidate], environment)
        return promise | {"new_widths": json.loads(seen)}

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        """Run a command in the folder, note it and the end of its output, and return its stdout.

        Raises RuntimeError if it fails or takes too long.
        """
        site = [str(ROOT), *filter(None, [environment.get("LIBRARY"), os.environ.get("PYTHONPATH")])]
        path = [str(ROOT / "benchmarks" / "observer"), *site] if "OBSERVED" in environment else site
        own = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **environment}
        own |= {"PYTHONPATH": os.pathsep.join(path), "HF_HOME": str(self._work / "hf")}
        own["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), own["PATH"]])
        own |= {"CUDA_VISIBLE_DEVICES": ""} if self._options.device == "cpu" else {}
        begun = time.monotonic()
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command, cwd=self._work, env=own, stdout=out, stderr=errors, text=True, start_new_session=True
            )
            try:
                code: int | str = process.wait(max(1.0, min(self._ends_at - begun, 1e6)))
            except subprocess.TimeoutExpired:
                code = "too slow"
            if code != 0:
                _end_group(process)
            text, said = (_read(each) for each in (out, errors))
        lines = [self._plain(line) for each in (said, text) for line in each.splitlines()[-LAST_LINES:]]
        seconds = time.monotonic() - begun
        self._log.append(
            {"command": [self._plain(each) for each in command], "code": code, "seconds": seconds, "last_lines": lines}
        )
        if code != 0:
            started = self._plain(" ".join(command[:8]))
            raise RuntimeError(f"{started} ... ended with {code}:\n" + "\n".join(lines[-LAST_LINES:]))
        return text

    def _plain(self, text: str) -> str:
        """Return a text without the folders of this machine."""
        libraries = "" if self._options.libraries is None else str(self._options.libraries.resolve())
        named = {str(self._work): ".", sys.executable: "python", libraries or "\0": "libraries", str(ROOT): "bexp"}
        for path, name in named.items():
            text = text.replace(path, name)
        return text


def _without(text: str, dropped: Collection[str]) -> str:
    """Return a YAML's text without the lines of some keys."""
    return "".join(line for line in text.splitlines(keepends=True) if line.partition(":")[0] not in dropped)


def _read(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def _end_group(process: subprocess.Popen[str]) -> None:
    """End what is left of a command that was started in a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _device() -> str | None:
    """The name of the card, read in another process, so that nothing of it is held here."""
    asked = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


if __name__ == "__main__":
    raise SystemExit(main())
