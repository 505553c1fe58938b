"""Files of programs that are not read: each is recognised, and the way that is named can be gone."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from bexp.explorer.formats.document import FormatError, load_document
from bexp.explorer.formats.request import parse_request

CONFIG = """
{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
 "vocab_size": 256}
"""
AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 32, local_batch_size: 4}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: my/llama}
packed_sequence: {packed_sequence_size: 256}
"""
TORCHTITAN = """
# a run of ours
[job]
dump_folder = "./outputs"  # a comment

[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 1
seq_len = 8192
"""
FILES = {
    "NeMo AutoModel": AUTOMODEL,
    "veRL": "actor_rollout_ref: {model: {path: my/llama}, actor: {ppo_mini_batch_size: 64}}",
    "ms-swift": "model: my/llama\ntrain_type: lora\ndataset: [a]\nmax_length: 2048\nper_device_train_batch_size: 2",
    "torchtitan": TORCHTITAN,
    "LitGPT": "checkpoint_dir: checkpoints/my/llama\ntrain: {micro_batch_size: 1, global_batch_size: 16}",
    "Lightning": "model: {class_path: my.Model, init_args: {lr: 0.1}}\ntrainer: {max_epochs: 1}",
    "accelerate launch": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2",
    "DeepSpeed": '{"train_batch_size": 32, "zero_optimization": {"stage": 2}}',
}


def refused(text: str) -> str:
    with pytest.raises(FormatError) as caught:
        parse_request(load_document(text))
    [(location, message)] = caught.value.errors
    assert location == ()
    return message


@pytest.mark.parametrize("program", FILES)
def test_a_file_of_another_program_is_refused_in_one_sentence_whose_way_works(program: str) -> None:
    message = refused(FILES[program])
    assert program in message
    command = shlex.split(re.findall("`(bexp explore [^`]*)`", message)[0])
    values = dict(zip(command[3::2], command[4::2], strict=True))
    fields: dict[str, Any] = {"hf_seq_length": values["--seq-length"], "batch_size": values["--batch-size"]}
    fields = {name: 128 if value == "N" else int(value) for name, value in fields.items()}
    if "--trainer" in values:
        fields["trainer"] = values["--trainer"]
    assert parse_request(load_document(CONFIG), overrides=fields).batch_size == fields["batch_size"]


def test_what_the_file_says_stands_in_the_way() -> None:
    assert "`bexp explore config.json --seq-length 256 --batch-size 32` with the config.json of my/llama" in refused(
        AUTOMODEL
    )
    assert "--seq-length 8192 --batch-size N --trainer torchtitan" in refused(TORCHTITAN)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[job]\na = ", "not valid TOML: "),
        ("[job]\na = nan\n", "must be a finite number"),
        ("[job]\na = 2026-01-01\n", "must be text, a number"),
        ("[job]\na = 1\n[job]\n", "not valid TOML: "),
    ],
)
def test_toml_has_the_limits_of_every_document(text: str, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        load_document(text)


@pytest.mark.parametrize(
    "text",
    [
        "model: {name: mine, flavor: {kind: 8}}",
        "model: my/llama\nmicro_batch_size: 2",
        "checkpoint_dir: here",
        "[1, 2]",
    ],
)
def test_other_documents_are_none_of_them(text: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_request(load_document(text))
    assert "which is not read" not in str(caught.value)
