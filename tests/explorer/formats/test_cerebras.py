from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.modelzoo import UNSUPPORTED_NETWORKS
from bexp.explorer.formats.request import parse_request
from tests.explorer.formats.refusals import refusal

GPT_111M = {
    "hidden_size": 768,
    "num_hidden_layers": 10,
    "num_heads": 12,
    "filter_size": 3072,
    "vocab_size": 50257,
    "max_position_embeddings": 2048,
    "position_embedding_type": "learned",
    "share_embedding_weights": True,
    "nonlinearity": "gelu",
    "dropout_rate": 0.1,
    "initializer": {"name": "truncated_normal", "std": 0.02},
    "mixed_precision": True,
    "fp16_type": "bfloat16",
}

LLAMA_1B = {
    "name": "llama",
    "attention_module": "multiquery_attention",
    "extra_attention_params": {"num_kv_groups": 8},
    "filter_size": 8192,
    "fp16_type": "cbfloat16",
    "hidden_size": 2048,
    "max_position_embeddings": 8192,
    "nonlinearity": "swiglu",
    "norm_type": "rmsnorm",
    "num_heads": 32,
    "num_hidden_layers": 16,
    "pos_scaling_type": "llama3",
    "position_embedding_type": "rotary",
    "rotary_dim": 64,
    "share_embedding_weights": True,
    "use_bias_in_output": False,
    "use_ffn_bias": False,
    "use_ffn_bias_in_attention": False,
    "use_projection_bias_in_attention": False,
    "vocab_size": 128256,
}


def run(**sections: Any) -> dict[str, Any]:
    document = {
        "runconfig": {"use_cs_grad_accum": True, "num_csx": 2, "max_steps": 100},
        "train_input": {"batch_size": 120, "micro_batch_size": "explore", "data_dir": "./data"},
        "model": GPT_111M,
    } | sections
    return {key: value for key, value in document.items() if value is not None}


def trainer(*callbacks: dict[str, Any], model: dict[str, Any] | None = None, **fit: Any) -> dict[str, Any]:
    return {
        "trainer": {
            "init": {
                "backend": {"backend_type": "CSX", "cluster_config": {"num_csx": 4}},
                "model": GPT_111M if model is None else model,
                "optimizer": {"AdamW": {"betas": [0.9, 0.95]}},
                "callbacks": [{"ComputeNorm": {}}, *callbacks],
            },
            "fit": fit or {"train_dataloader": {"batch_size": 120}},
        }
    }


def bta(enable: Any = True, max_tile: Any = 4) -> dict[str, Any]:
    return {"GlobalFlags": {"csx.debug.ini": {"ws_opt_enable_bta": enable, "ws_opt_bta_max_tile": max_tile}}}


def test_the_documented_run_configuration() -> None:
    text = """
        train_input:
          batch_size: 120
          micro_batch_size: explore
        model: {hidden_size: 768, num_hidden_layers: 10, num_heads: 12, max_position_embeddings: 2048}
        runconfig:
          use_cs_grad_accum: True
          num_csx: 2
    """
    request = parse_request(load_document(text))
    assert (request.mode, request.micro_batch_size) == ("train", "explore")
    assert (request.batch_size, request.num_devices) == (120, 2)
    assert request.shapes.seq_length == 2048


@pytest.mark.parametrize("choice", ["explore", "auto", {"explore": {"min": 2, "max": 8}}, 4])
@pytest.mark.parametrize("section", ["train_input", "eval_input"])
def test_micro_batch_choices_of_either_input(section: str, choice: Any) -> None:
    document = run(train_input=None) | {section: {"batch_size": 64, "micro_batch_size": choice}}
    request = parse_request(document)
    assert request.mode == section.removesuffix("_input")
    assert request.batch_size == 64
    assert request.micro_batch_size == parse_request({**NATIVE, "micro_batch_size": choice}).micro_batch_size


NATIVE = {
    "model": {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 1}
    | {"vocab_size": 8, "seq_length": 8}
}


def test_the_input_that_explores_decides_the_mode() -> None:
    both = run(
        train_input={"batch_size": 64, "micro_batch_size": 4},
        eval_input={"batch_size": 32, "micro_batch_size": "explore"},
    )
    assert (parse_request(both).mode, parse_request(both).batch_size) == ("eval", 32)
    equal = run(eval_input={"batch_size": 32, "micro_batch_size": "explore"})
    assert parse_request(equal).mode == "train"
    overridden = parse_request(equal, overrides={"mode": "eval"})
    assert (overridden.mode, overridden.batch_size) == ("eval", 32)


def test_an_answer_is_for_cerebras_unless_something_else_is_asked_for() -> None:
    assert parse_request(run()).trainer == "cerebras"
    assert parse_request(run(), overrides={"trainer": "bexp"}).trainer == "bexp"
    assert parse_request(run(), overrides={"recompute": ["full"]}).trainer is None
    assert parse_request({**run(), "attention_backends": ["flash"]}).trainer is None


@pytest.mark.parametrize("runconfig", [{}, {"use_cs_grad_accum": False}, {"use_cs_grad_accum": None}])
@pytest.mark.parametrize("choice", ["explore", {"explore": {"min": 1, "max": 2}}])
def test_exploring_needs_gradient_accumulation(runconfig: dict[str, Any], choice: Any) -> None:
    document = run(runconfig=runconfig, train_input={"batch_size": 8, "micro_batch_size": choice})
    assert "true" in refusal(document)["runconfig", "use_cs_grad_accum"]


def test_a_quoted_true_is_true() -> None:
    assert parse_request(run(runconfig={"use_cs_grad_accum": "True"})).micro_batch_size == "explore"


def test_a_trainer_with_bta() -> None:
    request = parse_request(trainer(bta()))
    assert (request.bta.enable, request.bta.max_tile) == (True, 4)
    assert (request.batch_size, request.num_devices, request.mode) == (120, 4, "train")
    assert count_parameters(request.shapes) == 111_050_496


def test_flags_may_be_dotted() -> None:
    dotted = {
        "GlobalFlags": {
            "csx.debug.ini.ws_opt_enable_bta": False,
            "csx.performance.micro_batch_size": {"explore": {"min": 2, "max": 4}},
        }
    }
    request = parse_request(trainer(dotted))
    assert request.bta.enable is False
    ranged = {"micro_batch_size": {"explore": {"min": 2, "max": 4}}}
    assert request.micro_batch_size == parse_request(NATIVE | ranged).micro_batch_size


def test_scoped_flags_decide_the_mode() -> None:
    scoped = {"ScopedValidateFlags": {"csx.performance.micro_batch_size": "explore"}}
    request = parse_request(trainer(scoped, train_dataloader={"batch_size": 120}, val_dataloader={"batch_size": 96}))
    assert (request.mode, request.batch_size) == ("eval", 96)


@pytest.mark.parametrize(
    ("document", "location", "part"),
    [
        (trainer(bta(max_tile=7)), ("GlobalFlags", "csx.debug.ini", "ws_opt_bta_max_tile"), "must divide"),
        (trainer(bta(max_tile=0)), ("ws_opt_bta_max_tile",), "greater than or equal to 1"),
        (trainer({"GlobalFlags": {"csx.debug.ini.ws_opt_bta": 2}}), ("csx.debug.ini.ws_opt_bta",), "not a known flag"),
        ({"trainer": {"init": {"callbacks": [bta()]}}}, ("trainer", "init", "model"), "missing"),
        ({"trainer": [1]}, ("trainer",), "keep one"),
        ({"trainer": {"devices": 8, "strategy": "fsdp"}, "model": LLAMA_1B}, ("trainer",), "devices, strategy;"),
        (trainer(train_dataloader={"batch_size": 120}, limit=3), ("trainer", "fit", "limit"), "known: ckpt_path"),
        (trainer({"Lora": {"r": 4}}), ("callbacks", 1, "Lora"), "training.lora"),
        (trainer({"MyCallback": {}}), ("callbacks", 1, "MyCallback"), "not a known callback"),
        (trainer(train_dataloader=[{"batch_size": 2}]), ("trainer", "fit", "train_dataloader"), "keep one"),
        (run(model=None), ("model",), "missing"),
        (run(optimizer={"optimizer_type": "lion"}), ("optimizer", "optimizer_type"), "supported: AdamW"),
        (run(sparsity={"sparsity": 0.75}), ("sparsity",), "sparse weights"),
        (run(batch_size=64), ("batch_size",), "second time, after train_input.batch_size"),
        (run(model={**GPT_111M, "num_heads": 7}), ("model", "hidden_size"), "num_heads is num_attention_heads"),
        (run(model={**GPT_111M, "position_embedding_type": "alibi"}), ("model", "position_embedding_type"), "alibi"),
        (run(model={**GPT_111M, "attention_sink_tokens": 4}), ("model", "attention_sink_tokens"), "sinks"),
        (run(model={**GPT_111M, "attention_logit_softcapping": 5.0}), ("attention_logit_softcapping",), "soft-capped"),
        (run(model={**GPT_111M, "nonlinearity": "squared_gelu"}), ("model", "nonlinearity"), "supported: gelu"),
        (run(model={**GPT_111M, "moe": {"num_experts": 4}}), ("model", "use_ffn_bias"), "biases in experts"),
        (run(model={**GPT_111M, "an_invention": 1}), ("model", "an_invention"), "known"),
        (run(model={**GPT_111M, "name": "gptx"}), ("model", "name"), "supported: gpt2"),
        (run(model={**GPT_111M, "name": "gptj"}), ("model", "use_untied_layer_norm"), "must be true"),
        (run(model={**GPT_111M, "use_untied_layer_norm": True}), ("model", "use_untied_layer_norm"), "belongs to gptj"),
        (run(model={"name": "dino"}), ("model", "name"), "vision network"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(document: dict[str, Any], location: tuple[str, ...], part: str) -> None:
    errors = refusal(document)
    messages = [message for where, message in errors.items() if where[-len(location) :] == location]
    assert messages, errors
    assert part in messages[0]


def test_a_gated_grouped_query_model() -> None:
    model = parse_request(run(model=LLAMA_1B)).shapes
    assert (model.query_groups, model.gated_mlp, model.activation, model.norm) == (8, True, "silu", "rmsnorm")
    assert (model.seq_length, model.dtype, model.position, model.rotary_fraction) == (8192, "bfloat16", "rope", 1.0)
    assert count_parameters(model) == 1_235_814_400


def test_a_mixture_of_experts_with_a_shared_one() -> None:
    moe = {"num_experts": 8, "top_k": 2, "num_shared_experts": 1, "load_balancing_loss_coef": 0.01, "router_fp32": True}
    spec = parse_request(run(model={**LLAMA_1B, "moe": moe})).shapes.moe
    assert spec is not None
    assert (spec.num_experts, spec.top_k, spec.norm_topk_prob) == (8, 2, True)
    assert spec.expert_ffn_hidden_size == spec.shared_expert_ffn_hidden_size == 8192
    assert parse_request(run(model={**LLAMA_1B, "moe_params": moe})).shapes.moe == spec
    assert parse_request(run(model={**LLAMA_1B, "moe": {"num_experts": 1}})).shapes.moe is None


def test_our_own_fields_beside_a_run() -> None:
    request = parse_request(run(budget={"max_trials": 3}, memory_limit_gib=8))
    assert (request.budget.max_trials, request.memory_limit_gib) == (3, 8)


def test_a_trainers_precision_goes_before_the_models() -> None:
    document = trainer()
    for precision, dtype in (({"fp16_type": "float16"}, "float16"), ({"enabled": False}, "float32"), ({}, "bfloat16")):
        document["trainer"]["init"]["precision"] = precision
        assert parse_request(document).shapes.dtype == dtype
    document["trainer"]["init"]["precision"] = {"fp16_type": "int8"}
    assert "int8" in refusal(document)["trainer", "init", "precision", "fp16_type"]


def test_precision_and_the_optimizer() -> None:
    assert parse_request(run(model={**GPT_111M, "mixed_precision": False})).shapes.dtype == "float32"
    assert parse_request(run(model={**GPT_111M, "fp16_type": "float16"})).shapes.dtype == "float16"
    assert parse_request(run(optimizer={"optimizer_type": "SGD"})).training.optimizer.name == "sgd"


@pytest.mark.parametrize("name", UNSUPPORTED_NETWORKS)
def test_a_network_that_cannot_be_explored_has_one_error(name: str) -> None:
    document = run(model={"name": name, "num_heads": 12, "an_invention": 1}, optimizer={"optimizer_type": "AdaFactor"})
    assert list(refusal(document)) == [("model", "name")]


def test_parallel_layers_with_a_norm_each() -> None:
    parallel = {**GPT_111M, "name": "falcon", "use_untied_layer_norm": True, "position_embedding_type": "rotary"}
    assert parse_request(run(model=parallel)).shapes.parallel_residual
    del parallel["position_embedding_type"]
    model = parse_request(run(model=parallel)).shapes
    assert (model.position, model.mlp_bias) == ("rope", False)  # defaults of Model Zoo's GPT-J class
    assert not parse_request(run()).shapes.parallel_residual


def test_a_cap_of_the_tile_counts_only_where_tiling_is_on() -> None:
    request = parse_request(trainer(bta(enable=False, max_tile=7)))
    assert (request.bta.enable, request.bta.max_tile) == (False, None)
    assert "ws_opt_bt" in request.notices[0]


def test_the_inputs_length_goes_before_the_models() -> None:
    data = {"batch_size": 120, "max_sequence_length": 512}
    assert parse_request(run(train_input=data)).seq_length == 512
    assert parse_request(run(train_input=data), overrides={"model.seq_length": 256}).seq_length == 256
    assert parse_request(run(train_input=data, model={"model_type": "gpt2"})).hf_seq_length == 512
    assert parse_request(trainer(train_dataloader=data)).seq_length == 512
    shapes = {key: value for key, value in NATIVE["model"].items() if key != "seq_length"}
    assert parse_request(run(train_input=data, model=shapes)).seq_length == 512
    assert ("train_input", "max_sequence_length") in refusal(run(train_input={**data, "max_sequence_length": 4096}))


@pytest.mark.parametrize("written", ["none", "None", None])
def test_a_micro_batch_of_none_is_the_default_which_divides_the_batch(written: Any) -> None:
    assert parse_request(run(train_input={"batch_size": 8})).micro_batch_choice == "auto"
    data = {"batch_size": 8, "micro_batch_size": written}
    assert parse_request(run(train_input=data)).micro_batch_choice == "auto"
    flag = {"ScopedTrainFlags": {"csx.performance.micro_batch_size": written}}
    assert parse_request(trainer(flag)).micro_batch_choice == "auto"


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ("runconfig", "grad_accum_steps"),
        ("runconfig", "num_csxs"),
        ("train_input", "micro_batchsize"),
        ("train_input", "use_vsl"),
        ("eval_input", "max_seq_length"),
    ],
)
def test_an_unknown_field_that_may_change_the_batch_is_refused(section: str, field: str) -> None:
    document = run(eval_input={"batch_size": 8})
    changed = {**document, section: {**document[section], field: 2}}
    assert "remove it if it changes no training step" in refusal(changed)[section, field]
    parse_request(document)


def test_unknown_fields_of_data_and_flags_are_noted() -> None:
    document = run(train_input={"batch_size": 8, "data_dir": "x", "tokenizer_file": "y"})
    assert any("what they change: tokenizer_file" in notice for notice in parse_request(document).notices)
    flags = {"GlobalFlags": {"csx.debug.retries": 2}}
    assert any("what they change: csx.debug.retries" in notice for notice in parse_request(trainer(flags)).notices)


@pytest.mark.parametrize("flag", ["ws_opt_max_grads", "ws_opt_bta_min_tile", "ws_opt_enable_BTA"])
def test_an_unknown_flag_of_optimisation_is_refused(flag: str) -> None:
    for flags in ({"csx.debug.ini": {flag: 2}}, {f"csx.debug.ini.{flag}": 2}):
        refused = refusal(trainer({"GlobalFlags": flags}))
        assert any("is not a known flag" in reason for reason in refused.values()), refused
    parse_request(trainer(bta()))
