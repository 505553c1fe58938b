"""`bexp tune` as a person runs it, with a command that trains."""

from __future__ import annotations

import json
import re
import sys

import torch

from tests.acceptance.conftest import Machine
from tests.forked_trainings import SCRIPTS, TORCHRUN
from tests.waits import PATIENCE_SECONDS

AXOLOTL = f"""
import os, runpy, sys, yaml
assert not os.environ.keys() & {{"BEXP_DATABASE_URL", "BEXP_API_TOKEN"}}, "a trial needs no secret"
given = yaml.safe_load(open(sys.argv[2]))
sizes = ["--per_device_train_batch_size", str(given["micro_batch_size"])]
sys.argv[1:] = [*sizes, "--gradient_accumulation_steps", "8", "--output_dir", given["output_dir"]]
runpy.run_path({str(SCRIPTS / "with_trainer.py")!r}, run_name="__main__")
"""
"""What answers like `axolotl train FILE`."""
ASKED = ("--device", "cpu", "--micro-batch-size", "4,8", "--max-trials", "2", "--max-seconds", "400")


def test_a_trainer_is_tuned_and_runs_with_the_answer_and_its_own_batch(machine: Machine) -> None:
    out = machine.folder / "out"
    flags = ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps=8", "--hub_token", "hf_secret")
    command = (sys.executable, SCRIPTS / "with_trainer.py", *flags, "--output_dir", out)
    process = machine.start("tune", *ASKED, "--run", "--", *command)
    assert process.wait(PATIENCE_SECONDS) == 0, machine.err(process)
    printed = machine.out(process)
    found = re.search(r"--per_device_train_batch_size 1 -> (\d)\s+--gradient_accumulation_steps 8 -> (\d)", printed)
    assert found is not None, printed
    size, steps = map(int, found.groups())
    assert size * steps == 8
    assert "GPT2LMHeadModel" in printed
    assert "Whole model" not in printed, "each trial measures the whole"
    assert re.search(rf"after +micro_batch_size={size}: [\d,]+ tokens/s, peak memory", printed)
    assert re.search(rf"worst micro-batch +{size} x 128 tokens ran first: no micro-batch", printed), "it has 200 texts"
    stored = b"".join(path.read_bytes() for path in (machine.folder / "data").rglob("*") if path.is_file())
    assert b"with_trainer.py" in stored
    assert b"hf_secret" not in stored
    used = torch.load(out / "training_args.bin", weights_only=False)
    assert (used.per_device_train_batch_size, used.gradient_accumulation_steps) == (size, steps)
    state = json.loads((out / "checkpoint-25" / "trainer_state.json").read_text())
    assert (state["train_batch_size"], state["global_step"], state["max_steps"]) == (size, 25, 25)
    assert (out / "finished").exists()
    assert (machine.folder / "best" / "model.safetensors").exists(), "its own callback saves in the run alone"
    kept = re.findall(r"^bexp: \d+ optimizer .* \S+ \+- \S+ of the [\d,]+ that were", machine.err(process), re.M)
    assert len(kept) == 1, machine.err(process)


REFUSED_BY_EXPLORE = "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rope: true\n"
"""Keys whose refusal names `bexp tune`."""


def test_a_yaml_of_axolotls_is_written_with_the_answer(machine: Machine) -> None:
    programs = machine.folder / "programs"
    programs.mkdir()
    (programs / "axolotl").write_text(f"#!{sys.executable}\n{AXOLOTL}")
    (programs / "axolotl").chmod(0o755)
    machine.environment |= {"PATH": f"{programs}:{machine.environment['PATH']}", "BEXP_API_TOKEN": "secret"}
    tuned = machine.folder / "tuned.yaml"
    (machine.folder / "own.yaml").write_text(
        f"micro_batch_size: 1 # small\noutput_dir: out\nother:\n  micro_batch_size: 1\n{REFUSED_BY_EXPLORE}"
    )
    asked = (*ASKED, "--micro-batch-size", "8", "--write", tuned)
    printed = machine.run("tune", *asked, "--", "axolotl", "train", "own.yaml")
    found = re.search(r"micro_batch_size: 1 -> (\d) in own.yaml\s+add gradient_accumulation_steps: (\d) to", printed)
    assert found is not None, printed
    size, steps = map(int, found.groups())
    assert tuned.read_text() == (
        f"micro_batch_size: {size} # small\noutput_dir: out\nother:\n  micro_batch_size: 1\n{REFUSED_BY_EXPLORE}"
        f"gradient_accumulation_steps: {steps}\n"
    )


def test_a_loop_of_ones_own_is_tuned_by_the_size_in_its_command(machine: Machine) -> None:
    out = machine.folder / "model"
    script = (sys.executable, SCRIPTS / "with_a_loop.py", "--output", out)
    fields = ("--batch", "{micro_batch_size}", "--accumulate", "{grad_accum_steps}")
    printed = machine.run("tune", *ASKED, "--max-trials", "1", "--batch-size", "8", "--", *script, *fields)
    found = re.search(r"for the command +\{micro_batch_size\} = (\d),\s+\{grad_accum_steps\} = (\d)", printed)
    assert found is not None, printed
    size, steps = map(int, found.groups())
    assert size * steps == 8
    assert re.search(r"worst micro-batch +not known", printed)
    assert not out.exists()


def test_two_processes_are_tuned_and_each_runs_with_the_answer(machine: Machine) -> None:
    out = machine.folder / "out"
    training = (SCRIPTS / "with_ranks.py", "trainer", "--steps", "100", "--slower", "0.002", "--output", out)
    command = (sys.executable, *TORCHRUN, *training)
    process = machine.start("tune", *ASKED, "--run", "--", *command)
    assert process.wait(PATIENCE_SECONDS) == 0, machine.err(process)
    found = re.search(r"^ +after +micro_batch_size=(\d): ", machine.out(process), re.M)
    assert found is not None, machine.out(process)
    assert re.search(r"^ +processes +2: rank 1 is the slowest", machine.out(process), re.M), machine.out(process)
    size = int(found[1])
    for rank in range(2):
        sizes = (out / f"sizes-{rank}").read_text().split()
        assert sizes == [str(size)] * (100 * 8 // size), "the batch of each device is 2 x 4"
    kept = re.findall(r"^bexp: \d+ optimizer steps ran", machine.err(process), re.M)
    assert len(kept) == 1, "the first process speaks for both"
