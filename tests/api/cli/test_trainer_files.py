"""A trainer's own file in a command: where its base model is, and what comes out again."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bexp.api.cli.errors import CommandError
from bexp.api.cli.exported_into import check_into, exported_into
from bexp.api.cli.files import read_document
from bexp.api.cli.options import build_request
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.exports.export import export
from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.request import parse_request
from bexp.explorer.request.request import ExplorationRequest
from tests.api.cli.conftest import Run
from tests.api.cli.samples import TINY
from tests.explorer.exports.samples import candidate, exploration
from tests.explorer.formats.trainer_files import (
    AXOLOTL_FSDP,
    CONFIG,
    FILES,
    FSDP2_LAUNCH,
    LLAMAFACTORY_ZERO3,
    ZERO3,
)

NAMES = [name for name in FILES if name != "torchtune"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with each file by its name, and their base model where they say."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/Llama-3.2-1B").mkdir(parents=True)
    (tmp_path / "models/Llama-3.2-1B/config.json").write_text(json.dumps(CONFIG))
    for name, (_, text) in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def asked_by(path: Path, trainer: str, **fields: Any) -> ExplorationRequest:
    return build_request(path, read_document(path), {"trainer": trainer, **fields})


def written(
    files: Path, name: str, best: Candidate, request: ExplorationRequest | None = None
) -> tuple[str, list[str]]:
    """The file with the export of an exploration, which it asked for, and what was said beside it."""
    trainer = FILES[name][0]
    asked = request or asked_by(files / name, trainer)
    exported = export(trainer, replace(exploration(best), request=asked))
    return exported_into(files / name, trainer, exported.text, asked)


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize("name", NAMES)
def test_the_file_comes_out_with_the_measured_size_and_asks_for_the_same_training(
    files: Path, name: str, recompute: Recompute
) -> None:
    """LoRA, packing, precision, optimizer and batch stay, whatever keys the file has for them."""
    trainer = FILES[name][0]
    best = candidate(8, expert_backend=None, recompute=recompute)
    text, comments = written(files, name, best)
    before, after = FILES[name][1], yaml.safe_load(text)
    size = "micro_batch_size" if trainer == "axolotl" else "per_device_train_batch_size"
    asked = asked_by(files / name, trainer)
    assert (after[size], after["gradient_accumulation_steps"]) == (8, (asked.batch_size or 0) // 8)
    (files / "tuned.yaml").write_text(text)
    again = asked_by(files / "tuned.yaml", trainer)
    told = {"base_micro_batch_size", "base_recompute", "notices"}
    assert again.model_dump(exclude=told) == asked.model_dump(exclude=told)
    assert again.base_micro_batch_size == 8
    kept = [line for line in before.splitlines() if line.startswith(("#", "output_dir", "learning_rate", "dataset"))]
    assert set(kept) <= set(text.splitlines())
    assert again.base_recompute == (None if recompute is Recompute.NONE else recompute), "the default needs no line"
    assert (trainer == "trl") is not any("expect about" in line or "promises no" in line for line in comments)


def test_other_names_of_a_key_give_way_to_those_of_the_export(files: Path) -> None:
    after = yaml.safe_load(written(files, "axolotl", candidate(4, expert_backend=None))[0])
    assert (after["attn_implementation"], after["flash_attention"]) == ("sdpa", None)
    assert after["gradient_checkpointing_kwargs"] == {"use_reentrant": True}, "nothing is recomputed"
    recomputed = candidate(4, expert_backend=None, recompute=Recompute.FULL)
    text, _ = written(files, "axolotl", recomputed)
    assert "gradient_checkpointing_kwargs:\n  use_reentrant: false\nflash_attention: null\n" in text
    assert "gradient_accumulation_steps: 4  # times two\nmicro_batch_size: 4\n" in text
    newer = FILES["trl"][1].replace("gradient_checkpointing", "activation_checkpointing")
    (files / "trl").write_text(newer)
    trl = yaml.safe_load(written(files, "trl", candidate(4, expert_backend=None))[0])
    assert (trl["gradient_checkpointing"], trl["activation_checkpointing"]) == (False, None)


PLAIN = candidate(4, expert_backend=None)


def test_a_batch_of_a_device_gives_way_to_steps(files: Path) -> None:
    """Axolotl takes one of both."""
    (files / "axolotl").write_text(FILES["axolotl"][1].replace("gradient_accumulation_steps: 8", "batch_size: 16"))
    after = yaml.safe_load(written(files, "axolotl", candidate(1, expert_backend=None))[0])
    assert (after["batch_size"], after["gradient_accumulation_steps"]) == (None, 2)


def test_the_momentum_of_the_file_stays(files: Path) -> None:
    for added, kept in (("", None), ("\noptim_args: momentum=0.95", "momentum=0.95")):
        text = re.sub("optim: .*", f"optim: sgd{added}", FILES["llamafactory, full"][1])
        (files / "llamafactory, full").write_text(text)
        after = yaml.safe_load(written(files, "llamafactory, full", PLAIN)[0])
        assert (after["optim"], after.get("optim_args")) == ("sgd", kept)


def test_keys_of_what_was_not_measured_become_null_and_are_named(files: Path) -> None:
    plain = asked_by(files / "axolotl, QLoRA", "axolotl", quantization="none")
    text, comments = written(files, "axolotl, QLoRA", PLAIN, plain)
    after = yaml.safe_load(text)
    assert (after["adapter"], after["load_in_4bit"]) == ("lora", None)
    assert "null, because it was not measured: load_in_4bit" in comments
    text, comments = written(files, "axolotl, QLoRA", PLAIN, asked_by(files / "axolotl", "axolotl"))
    after = yaml.safe_load(text)
    assert (after["adapter"], after["load_in_4bit"], after["sample_packing"]) == (None, None, True)
    assert "null, because it was not measured: load_in_4bit, adapter" in comments
    (files / "trl").write_text("model_name_or_path: a/b\ndtype: bfloat16\nuse_peft: true\nlora_r: 16\n")
    after = yaml.safe_load(
        written(files, "trl", PLAIN, asked_by(files / "trl, full", "trl", **{"training.precision": "pure"}))[0]
    )
    assert (after["use_peft"], after["bf16"]) == (None, False)


@pytest.mark.parametrize(
    ("name", "added", "words"),
    [
        ("axolotl", "deepspeed: zero2.json", r"axolotl\.deepspeed: is the path of a file that was not found"),
        ("axolotl, QLoRA", "sample_packing: true", "batching: packed in the file, full sequences in the exploration"),
        ("axolotl, QLoRA", "peft_use_dora: true", r"training\.lora: .*'use_dora': True\} in the file"),
        ("llamafactory, full", "use_unsloth: true", r"llamafactory\.use_unsloth: these kernels"),
        ("trl", "lora_r: 8", r"training\.lora: \{'r': 8, .*\} in the file, \{'r': 16, .*\} in the exploration"),
        ("trl", "dtype: float32", r"training\.precision: autocast in the file, pure in the exploration"),
    ],
)
def test_a_file_that_trains_otherwise_than_was_measured_is_not_written(
    files: Path, name: str, added: str, words: str
) -> None:
    asked, key = asked_by(files / name, FILES[name][0]), added.partition(":")[0]
    others = [line for line in FILES[name][1].splitlines() if not line.startswith(f"{key}:")]
    (files / name).write_text("\n".join([*others, added, ""]))
    with pytest.raises(CommandError, match=words):
        written(files, name, PLAIN, asked)


@pytest.mark.parametrize("dtype", ["float16", None])
def test_weights_in_float16_are_held_against_no_file(files: Path, dtype: str | None) -> None:
    """No reader of these files takes them."""
    asked = asked_by(files / "llamafactory, full", "llamafactory", **{"training.precision": "autocast"})
    asked = asked.model_copy(update={"hf_config": {**(asked.hf_config or {}), "dtype": dtype}})
    assert yaml.safe_load(written(files, "llamafactory, full", PLAIN, asked)[0])["finetuning_type"] == "full"


def test_a_file_gets_the_answer_of_shapes_and_of_sharding(files: Path) -> None:
    """The keys of an export are the file's own, whatever the reader says of them."""
    sharded = asked_by(
        files / "axolotl, QLoRA",
        "axolotl",
        **{"optim": "adamw", "num_devices": 2, "quantization": "none", "training.sharding": "zero2"},
    )
    after = yaml.safe_load(written(files, "axolotl, QLoRA", PLAIN, sharded)[0])
    assert after["fsdp_config"]["reshard_after_forward"] is False
    shapes = parse_request(TINY | {"trainer": "llamafactory"})
    after = yaml.safe_load(written(files, "llamafactory", PLAIN, shapes)[0])
    assert (after["finetuning_type"], after["cutoff_len"]) == ("full", 32)


def test_a_whole_file_is_not_told_what_else_it_needs(files: Path) -> None:
    for name in ("axolotl", "llamafactory"):
        said = written(files, name, PLAIN)[1]
        assert not any(line.startswith("add ") for line in said)
        assert all(line[0].isalnum() for line in said), "no sign of a comment is left"


def test_only_a_yaml_that_is_read_is_written(files: Path) -> None:
    for name in (None, "torchtune", "megatron"):
        with pytest.raises(CommandError, match="--into needs --format trl or axolotl or llamafactory"):
            check_into(name)
    asked = asked_by(files / "axolotl", "axolotl")
    with pytest.raises(CommandError, match="No such file"):
        exported_into(files / "missing.yaml", "axolotl", "micro_batch_size: 8\n", asked)
    (files / "list.yaml").write_text("- 1\n")
    with pytest.raises(CommandError, match=r"--into .*list.yaml: it is no mapping"):
        exported_into(files / "list.yaml", "axolotl", "micro_batch_size: 8\n", asked)


def test_a_base_model_on_the_hub_is_named_by_its_config(files: Path, bexp: Run) -> None:
    path = files / "sft.yaml"
    path.write_text(FILES["axolotl"][1].replace("models/Llama-3.2-1B", "nobody/no-such-model"))
    done = bexp("submit", path, "--trainer", "axolotl")
    assert done.code == 2
    assert "the base model 'nobody/no-such-model' is not on this disk" in done.stderr
    assert "hf download nobody/no-such-model config.json --local-dir . and then --model config.json" in done.stderr
    done = bexp("submit", path, "--trainer", "axolotl", "--model", "models/Llama-3.2-1B")
    assert done.code == 0, done.stderr
    assert (
        "explored in place of the file's values: the micro-batch (its 2 is the base, with every layer recomputed)"
        in done.stderr
    )
    done = bexp("submit", "models/Llama-3.2-1B", "--model", "models/Llama-3.2-1B")
    assert "--model is for a trainer's own file" in done.stderr


def test_a_base_model_in_the_cache_of_the_hub_is_found(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    config = str(files / "models/Llama-3.2-1B/config.json")
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: config if name == "a/b" else None)
    path = files / "sft.yaml"
    path.write_text(FILES["trl"][1].replace("models/Llama-3.2-1B", "a/b"))
    assert asked_by(path, "trl").batch_size == 16


def test_the_json_that_a_file_names_is_read_from_its_folder(
    files: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """DeepSpeed's stages shard nothing on one device; what the JSON offloads is refused before anything is measured."""
    (files / "axolotl").write_text(FILES["axolotl, QLoRA"][1] + "deepspeed: parts/zero.json\n")
    (files / "parts").mkdir()
    (files / "parts/zero.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    asked = asked_by(files / "axolotl", "axolotl")
    assert asked.training.lora is not None
    assert not any("is not read" in notice for notice in asked.notices)
    after = yaml.safe_load(written(files, "axolotl", PLAIN, asked)[0])
    assert after["deepspeed"] == "parts/zero.json"
    offloads = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    (files / "parts/zero.json").write_text(json.dumps(offloads))
    with pytest.raises(FormatError, match=r"axolotl\.deepspeed\.zero_optimization\.offload_optimizer"):
        asked_by(files / "axolotl", "axolotl")


SHARDED = {
    "axolotl": (AXOLOTL_FSDP, {"micro_batch_size", "gradient_accumulation_steps", "accelerator_config"}),
    "llamafactory": (LLAMAFACTORY_ZERO3, {"per_device_train_batch_size", "gradient_accumulation_steps"}),
}
"""Files that FSDP and DeepSpeed shard, with the keys that a change of size changes."""


@pytest.mark.parametrize("trainer", SHARDED)
def test_a_sharded_file_comes_back_with_one_changed_size(files: Path, trainer: str) -> None:
    text, expected = SHARDED[trainer]
    (files / trainer).write_text(text)
    (files / "zero3.json").write_text(json.dumps(ZERO3))
    asked = asked_by(files / trainer, trainer, num_devices=2)
    assert (asked.training.sharding, asked.batch_size) == ("zero3", 8)
    best = candidate(2, expert_backend=None, recompute=asked.base_recompute or Recompute.NONE)
    exported = export(trainer, replace(exploration(best), request=asked))
    after, comments = exported_into(files / trainer, trainer, exported.text, asked)
    old, new = text.splitlines(), after.splitlines()
    changed = {line.partition(":")[0] for line in new if line not in old}
    assert changed == expected
    assert [line for line in old if line.partition(":")[0] not in expected] == [
        line for line in new if line.partition(":")[0] not in expected
    ], "nothing else changes"
    assert not any("promises no" in line for line in comments)


@pytest.mark.parametrize("said", ["", "lora_qkv_kernel: true\n"])
def test_kernels_that_axolotl_turns_on_by_itself_are_turned_off_in_the_file(files: Path, said: str) -> None:
    path = files / "axolotl, QLoRA"
    asked = asked_by(path, "axolotl")
    path.write_text(path.read_text() + said)
    after = yaml.safe_load(written(files, path.name, PLAIN, asked)[0])
    assert [after[f"lora_{part}_kernel"] for part in ("mlp", "qkv", "o")] == [False] * 3


def test_the_answer_of_recomputation_goes_where_the_file_has_it(files: Path) -> None:
    """FSDP's own key changes among those of FSDP, with the comments around it."""
    text = AXOLOTL_FSDP.replace("  reshard_after_forward: true\n", "  activation_checkpointing: true  # needed\n")
    (files / "axolotl").write_text(text)
    asked = asked_by(files / "axolotl", "axolotl", num_devices=2)
    assert asked.base_recompute == "full"
    for recompute, said in ((Recompute.NONE, "false"), (Recompute.FULL, "true")):
        after = written(files, "axolotl", candidate(1, expert_backend=None, recompute=recompute), asked)[0]
        assert f"  activation_checkpointing: {said}  # needed\n" in after
        assert "  offload_params: false  # there is room\n" in after
        assert not yaml.safe_load(after).get("gradient_checkpointing")
    (files / "axolotl").write_text(
        f"{text}gradient_checkpointing: false\n".replace("activation_checkpointing: true", "")
    )
    asked = asked_by(files / "axolotl", "axolotl", num_devices=2)
    best = candidate(1, expert_backend=None, recompute=Recompute.FULL)
    assert yaml.safe_load(written(files, "axolotl", best, asked)[0])["gradient_checkpointing"] is True


def test_another_level_than_that_of_the_file_replaces_its_keys(files: Path) -> None:
    (files / "axolotl").write_text(AXOLOTL_FSDP)
    asked = asked_by(files / "axolotl", "axolotl", num_devices=2, **{"training.sharding": "zero2"})
    after = yaml.safe_load(written(files, "axolotl", PLAIN, asked)[0])
    assert (after["fsdp_version"], after["fsdp_config"]["reshard_after_forward"]) == (2, False)


def test_the_configuration_of_the_launcher_is_an_option(files: Path, bexp: Run) -> None:
    launch = files / "fsdp2.yaml"
    launch.write_text(yaml.safe_dump(FSDP2_LAUNCH))
    path, model = files / "trl, full", files / "models/Llama-3.2-1B"
    asked = build_request(path, read_document(path), {"trainer": "trl"}, launch=launch)
    assert (asked.num_devices, asked.training.sharding, asked.training.precision) == (4, "zero3", "master")
    text, _comments = written(files, "trl, full", candidate(8, expert_backend=None, recompute=Recompute.FULL), asked)
    after = yaml.safe_load(text)
    assert after["per_device_train_batch_size"] == 8
    assert after.keys().isdisjoint({"fsdp", "fsdp_config", "deepspeed"}), "the launcher has them"
    recomputed = {**FSDP2_LAUNCH["fsdp_config"], "fsdp_activation_checkpointing": "true"}
    launch.write_text(yaml.safe_dump({**FSDP2_LAUNCH, "fsdp_config": recomputed}))
    asked = build_request(model, read_document(model), {"batch_size": 64, "trainer": "trl"}, launch=launch)
    said = export("trl", replace(exploration(PLAIN), request=asked)).header
    assert "in the configuration of accelerate launch: fsdp_activation_checkpointing: false" in said
    asked = build_request(
        model, read_document(model), {"batch_size": 64, "trainer": "trl", "training.sharding": "zero2"}, launch=launch
    )
    said = export("trl", replace(exploration(PLAIN), request=asked)).header
    assert "measured with sharding zero2: the configuration of accelerate launch must say that" in said
    refused = bexp("explore", str(launch))
    assert refused.code == 2
    assert "--accelerate FILE" in " ".join(refused.stderr.split())


def test_deepspeed_s_json_of_a_launcher_is_found_next_to_it(files: Path) -> None:
    (files / "launch").mkdir()
    (files / "launch/zero.json").write_text(json.dumps(ZERO3))
    inner = {"deepspeed_config_file": "zero.json", "zero3_init_flag": True}
    (files / "launch/ds.yaml").write_text(
        yaml.safe_dump({"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": inner})
    )
    path = files / "trl, full"
    asked = build_request(path, read_document(path), {"trainer": "trl"}, launch=files / "launch/ds.yaml")
    assert (asked.training.sharding, asked.num_devices) == ("zero3", 2)
