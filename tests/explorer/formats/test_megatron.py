from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.formats import megatron
from bexp.explorer.formats import nemo as nemo_format
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.training import Sharding
from tests.explorer.formats.refusals import refusal

FLAGS = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 256
--vocab-size 500 --micro-batch-size 2 --global-batch-size 32 --bf16
"""
LLAMA = f"{FLAGS} --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
DROPPING = "--num-experts 8 --disable-bias-linear --moe-expert-capacity-factor 1.25"
NEMO = """
name: megatron_gpt
trainer: {devices: 8, num_nodes: 2, accelerator: gpu, precision: bf16-mixed, max_steps: 10}
model:
  encoder_seq_length: 128
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 4
  micro_batch_size: 2
  global_batch_size: 32
  tensor_model_parallel_size: 1
  vocab_size: 500
"""


def nemo(**changes: Any) -> dict[str, Any]:
    document = load_document(NEMO)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        document[section] = {**document.get(section, {}), name: value}
    return document


def test_flags_with_megatrons_defaults() -> None:
    request = parse_request(load_document(FLAGS))
    model = request.shapes
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.seq_length) == (4, 64, 256, 128)
    assert (model.position, model.position_rows, model.norm, model.activation) == ("learned", 256, "layernorm", "gelu")
    assert (model.qkv_bias, model.mlp_bias, model.tie_embeddings, model.gated_mlp) == (True, True, True, False)
    assert model.vocab_size == 512  # padded to a multiple of 128
    assert (request.batch_size, request.base_micro_batch_size, request.micro_batch_choice) == (32, 2, "auto")
    assert request.training.optimizer.grad_dtype == "float32"


def test_a_gated_grouped_query_model() -> None:
    text = f"{LLAMA} --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
    model = parse_request(load_document(text)).shapes
    assert (model.query_groups, model.activation, model.gated_mlp, model.norm) == (2, "silu", True, "rmsnorm")
    assert model.ffn_hidden_size == 128  # 4 * 64 * 2 / 3, rounded down to a multiple of 64
    attention, ffn, norms = 64 * (64 + 2 * 32 + 64), 3 * 64 * 128, 2 * 64
    assert count_parameters(model) == 4 * (attention + ffn + norms) + 2 * 512 * 64 + 64


@pytest.mark.parametrize(
    "given",
    [
        "torchrun --nproc_per_node 8 pretrain_gpt.py \\\n" + FLAGS.replace("\n", " \\\n "),
        FLAGS.replace("--num-layers 4", "--num-layers=4") + "# a comment",
        FLAGS.split(),
        {"num-layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 500,
         "max_position_embeddings": 256, "micro_batch_size": 2, "global_batch_size": 32, "--bf16": True},
    ],
    ids=["command", "text", "words", "mapping"],
)  # fmt: skip
def test_flags_may_be_a_command_a_text_words_or_a_mapping(given: Any) -> None:
    assert parse_request({"megatron": given}) == parse_request(load_document(FLAGS))


@pytest.mark.parametrize(("frequency", "expected"), [("1", (0, 1)), ("'[0, 1, 1, 1]'", (1, 1)), ("[0,1,0,1]", (0, 2))])
def test_layers_with_experts(frequency: str, expected: tuple[int, int]) -> None:
    text = f"{LLAMA} --num-experts 8 --moe-ffn-hidden-size 32 --moe-layer-freq {frequency} --moe-grouped-gemm"
    moe = parse_request(load_document(text)).shapes.moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.expert_ffn_hidden_size, moe.norm_topk_prob) == (8, 2, 32, True)
    assert (moe.first_k_dense, moe.moe_layer_frequency) == expected
    assert moe.capacity_factor is None


def test_a_capacity_factor_is_read_with_the_policy_that_is_supported() -> None:
    text = f"{LLAMA} --num-experts 8 --moe-ffn-hidden-size 32 --moe-token-drop-policy"
    for more, factor in (("position", None), ("probs --moe-expert-capacity-factor 1.25", 1.25)):
        moe = parse_request(load_document(f"{text} {more}")).shapes.moe
        assert moe is not None
        assert moe.capacity_factor == factor


def test_sharding_and_context_parallelism() -> None:
    def sharding(more: str) -> Sharding:
        document = {**load_document(FLAGS + more), "num_devices": 4}
        return parse_request(document).training.sharding

    assert sharding("") is Sharding.NONE
    assert sharding("--use-distributed-optimizer") is Sharding.ZERO1
    assert sharding("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads") is Sharding.ZERO2
    assert sharding("--use-torch-fsdp2") is Sharding.ZERO3
    document = {**load_document(FLAGS + "--context-parallel-size 2"), "num_devices": 4}
    assert parse_request(document).devices.context_parallel_sizes == (2,)


@pytest.mark.parametrize(
    ("method", "layers", "named"),
    [("block", 3, "layers_3"), ("block", 4, None), ("uniform", 1, None), ("uniform", 2, "groups_2"),
     ("uniform", 9, "groups_4")],
)  # fmt: skip
def test_a_number_of_recomputed_layers_is_explored_beside_every_policy(
    method: str, layers: int, named: str | None
) -> None:
    flags = f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {layers}"
    request = parse_request(load_document(FLAGS + flags))
    asked = {"granularity": "full", "method": method, "num_layers": layers}
    of_nemo = parse_request(nemo(**{f"model__activations_checkpoint_{key}": value for key, value in asked.items()}))
    assert request.recompute == of_nemo.recompute
    assert f"full {method} with {layers} layers" in request.notices[0]
    if named is None:
        assert request.recompute is None
        return
    assert request.recompute is not None
    assert request.space.recompute_policies == (*parse_request(load_document(FLAGS)).space.recompute_policies, named)
    assert f"'{named}'" in request.notices[0]


def test_what_a_request_says_of_recomputation_stands_beside_the_flags() -> None:
    document = load_document(
        f"{LLAMA} --recompute-granularity full --recompute-method uniform --recompute-num-layers 2 --use-torch-fsdp2"
    )
    assert parse_request({**document, "num_devices": 2}).recompute is None, "zero3 would gather parameters once more"
    document = load_document(f"{LLAMA} --recompute-granularity full --recompute-method block --recompute-num-layers 2")
    assert parse_request({**document, "recompute": ["none", "layers_1"]}).recompute == ("none", "layers_1")
    compiled = parse_request(document, overrides={"execution": "compile"}).recompute
    assert compiled is not None
    assert "layers_2" in compiled
    assert "activations" not in compiled
    flags = document["megatron"].replace("--micro-batch-size 2", "")
    spread = f"{flags} --pipeline-model-parallel-size 2"
    assert parse_request({"megatron": spread, "num_devices": 8}).recompute is None


@pytest.mark.parametrize(
    ("more", "flag", "part"),
    [
        ("--tensor-model-parallel-size 2", "tensor_model_parallel_size", "does not divide num_devices"),
        ("--pipeline-model-parallel-size 2", "pipeline_model_parallel_size", "does not divide num_devices"),
        ("--fp8-format hybrid", "fp8_format", "FP8"),
        ("--an-invention 3", "an_invention", "not a known argument"),
        ("--optimizer muon", "optimizer", "supported: adam"),
        ("--save $FOLDER", "save", "shell variable"),
        ("--recompute-method ring", "recompute_method", "supported: uniform, block"),
        ("--fp16", "fp16", "contradicts bf16"),
        ("--num-experts 8", "disable_bias_linear", "biases in experts"),
        (f"{DROPPING} --moe-token-drop-policy position", "moe_token_drop_policy", "supported: probs"),
        (f"{DROPPING} --moe-pad-expert-input-to-capacity", "moe_pad_expert_input_to_capacity", "not padded"),
        ("--num-experts 8 --disable-bias-linear --moe-layer-freq 2", "moe_layer_freq", "must be a number, or a list"),
    ],
)
def test_flags_that_cannot_be_honoured_are_named(more: str, flag: str, part: str) -> None:
    assert part in refusal(load_document(FLAGS + more))["megatron", flag]


@pytest.mark.parametrize("given", ["", "python x.py", 3, [], "--num-layers '4"])
def test_what_is_no_flag(given: Any) -> None:
    assert "flags" in refusal({"megatron": given})["megatron",]


def test_a_missing_vocabulary_may_be_an_override() -> None:
    document = load_document(FLAGS.replace("--vocab-size 500", ""))
    assert "tokenizer" in refusal(document)["megatron", "vocab_size"]
    assert parse_request(document, overrides={"model.vocab_size": 500}).shapes.vocab_size == 500


def test_a_nemo_file() -> None:
    request = parse_request(nemo())
    model = request.shapes
    assert (model.num_layers, model.ffn_hidden_size, model.vocab_size, model.position_rows) == (4, 256, 512, 128)
    assert (model.dtype, model.position, model.mlp_bias, model.tie_embeddings) == ("bfloat16", "learned", True, True)
    assert (request.num_devices, request.batch_size, request.base_micro_batch_size) == (16, 32, 2)
    assert (request.flash_attention, request.training.sharding) == (True, Sharding.NONE)
    changed = parse_request(
        nemo(
            model__num_query_groups=2,
            model__activation="fast-swiglu",
            model__normalization="rmsnorm",
            model__bias=False,
            model__use_flash_attention=False,
            model__optim={"name": "distributed_fused_adam", "lr": 1e-4},
            model__activations_checkpoint_granularity="full",
            model__activations_checkpoint_method="uniform",
            model__activations_checkpoint_num_layers=2,
            model__tokenizer={"library": "megatron"},
        )
    )
    model = changed.shapes
    assert (model.query_groups, model.activation, model.norm, model.mlp_bias) == (2, "silu", "rmsnorm", False)
    assert (changed.flash_attention, changed.training.sharding) == (False, Sharding.ZERO1)
    assert "full uniform with 2 layers" in " ".join(changed.notices)


def test_an_optimizer_that_is_distributed_on_one_gpu_is_whole() -> None:
    alone = {"model__optim": {"name": "distributed_fused_adam"}, "trainer__devices": 1, "trainer__num_nodes": 1}
    of_nemo, of_flags = (
        parse_request(nemo(**alone)),
        parse_request(load_document(f"{FLAGS} --use-distributed-optimizer")),
    )
    for request in (of_nemo, of_flags):
        assert (request.num_devices, request.training.sharding) == (1, Sharding.NONE)
        assert any("zero1 shards nothing on one device" in notice for notice in request.notices)
    spread = parse_request(load_document(f"{FLAGS} --use-distributed-optimizer"), overrides={"num_devices": 2})
    assert spread.training.sharding is Sharding.ZERO1, "as the note says"
    assert not any("shards nothing" in notice for notice in spread.notices)


def test_a_nemo_file_with_parallel_sizes_is_a_mesh_whose_base_is_open() -> None:
    request = parse_request(nemo(model__tensor_model_parallel_size=4))
    assert (request.parallelism.tensor, request.base_micro_batch_size, request.devices.share_model) == (4, None, True)
    assert "micro_batch_size is open: the arguments have 2" in " ".join(request.notices)


@pytest.mark.parametrize(
    ("changes", "location", "part"),
    [
        ({"model__tensor_model_parallel_size": 3}, ("model", "tensor_model_parallel_size"), "does not divide"),
        ({"model__pipeline_model_parallel_size": 5}, ("model", "pipeline_model_parallel_size"), "does not divide"),
        ({"model__activations_checkpoint_method": "ring"}, ("model", "activations_checkpoint_method"), "uniform"),
        ({"model__encoder_seq_length": "${oc.env:LENGTH}"}, ("model", "encoder_seq_length"), "write the value out"),
        ({"model__encoder_seq_length": 512}, ("model", "encoder_seq_length"), "exceeds max_position"),
        ({"model__transformer_block_type": "post_ln"}, ("model", "transformer_block_type"), "supported: pre_ln"),
        ({"model__an_invention": 1}, ("model", "an_invention"), "not a known argument"),
        ({"trainer__strategy": "fsdp"}, ("trainer", "strategy"), "not a known field"),
        ({"trainer__precision": "fp8"}, ("trainer", "precision"), "supported: bf16"),
        ({"trainer__accumulate_grad_batches": 2}, ("trainer", "accumulate_grad_batches"), "must be 1"),
    ],
)
def test_what_a_nemo_file_cannot_ask_for(changes: Any, location: tuple[str, ...], part: str) -> None:
    document = nemo(**changes)
    if changes.get("model__encoder_seq_length") == 512:
        document["model"]["max_position_embeddings"] = 128
    assert part in refusal(document)[location]


def test_arguments_that_change_nothing_leave_the_request_as_it_is() -> None:
    flags = [*megatron.IGNORED, *(f"{prefix}x" for prefix in megatron.IGNORED_PREFIXES)]
    words = FLAGS.split()
    more = [word for flag in flags for word in (f"--{flag}", "1")]
    assert parse_request({"megatron": words + more}) == parse_request({"megatron": words})
    read = {"optim", "precision", "megatron_amp_O2", "tokenizer", "data"}
    fields = {f"model__{key}": 1 for key in nemo_format.IGNORED if key not in read}
    assert parse_request(nemo(**fields)) == parse_request(nemo())
