"""Megatron-Core's arguments as a request: the flags of `pretrain_gpt.py`, or those that stand for a NeMo YAML.

The shapes, the global batch, the number formats and sharding are kept. The choices of an exploration are open: the
micro-batch of the arguments is the base to compare with, and their recomputation is named in a notice. Defaults are
those of Megatron-LM's argument parser. A flag that is neither read nor known to change nothing is refused by name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from bexp.explorer.dimensions.recompute import ON_DEVICE, Recompute
from bexp.explorer.model.model import find_layer_pattern
from bexp.explorer.model.spelling import shortened
from bexp.explorer.model.translation import Location, Section, Translation
from bexp.explorer.trainers.keys import because, words

ACTIVATIONS = {"gelu": ("gelu", False), "relu": ("relu", False)} | {
    name: (inner, True) for name, inner in (("swiglu", "silu"), ("geglu", "gelu"), ("reglu", "relu"))
}
NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}
STRATEGIES = {"no_shard": "none", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}
PARALLEL_SIZES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "expert_model_parallel_size": "expert",
}


def read_flags(given: Any, location: Location, translation: Translation) -> dict[str, Any] | None:
    """Return flags by name, with underscores, from a text, a list of words, or a mapping; None if there are none.

    A command line is cut after the name of its script, such as `pretrain_gpt.py`.
    """
    if isinstance(given, Mapping):
        return {str(name).removeprefix("--").replace("-", "_"): value for name, value in given.items()}
    try:
        if isinstance(given, str):
            words = shlex.split(given.replace("\\\n", " "), comments=True)
        else:
            words = [str(word) for word in given] if isinstance(given, list | tuple) else []
    except ValueError as error:
        translation.refuse(location, f"cannot be read as flags: {error}")
        return None
    scripts = [index for index, word in enumerate(words) if word.endswith(".py")]
    words = words[scripts[-1] + 1 :] if scripts else words
    if not words or not words[0].startswith("--"):
        translation.refuse(location, "must be flags, such as `--num-layers 24 --bf16`, or a list of their words")
        return None
    flags: dict[str, Any] = {}
    for name, values in _group(words):
        if any("$" in value for value in values):
            translation.refuse((*location, name), "contains a shell variable: write its value out")
        read = [_number(value) for value in values]
        flags[name] = True if not read else read[0] if len(read) == 1 else read
    return flags


def _group(words: list[str]) -> list[tuple[str, list[str]]]:
    """Return each flag with the words that follow it."""
    grouped: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            grouped.append((name.replace("-", "_"), [value] if equals else []))
        else:
            grouped[-1][1].append(word)
    return grouped


def _number(text: str) -> Any:
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?(\d{1,18}\.\d*|\.\d+|\d+(\.\d*)?[eE]-?\d{1,2})", text) else text


def translate_arguments(arguments: Section, given: Mapping[str, Any], stated: Mapping[str, Any]) -> None:
    """Set the model, the batch and the training state from Megatron's arguments.

    `given` holds the fields of the model that an override sets, which the arguments may then lack. `stated` holds
    `recompute` and `execution` of the request; None where the request has none.
    """
    arguments.refuse_where_set(REFUSED)
    for key, name in PARALLEL_SIZES.items():
        arguments.take(key, ("parallelism", name), 1)
    sizes = [arguments.translation.get("parallelism", name) for name in PARALLEL_SIZES.values()]
    is_shared = sizes != [1] * len(sizes)
    if (size := arguments.integer("context_parallel_size", 1)) not in (None, 1):
        arguments.translation.put(("context_parallel", "sizes"), [size], arguments.at("context_parallel_size"))
    _take_shapes(arguments)
    _take_vocabulary(arguments, given)
    _take_ffn(arguments)
    _take_batch(arguments, is_shared=is_shared)
    _take_training(arguments)
    _take_recomputation(arguments, stated, is_shared=is_shared)
    arguments.ignore(IGNORED)
    arguments.ignore({key for key in arguments.values if key.startswith(IGNORED_PREFIXES)})
    arguments.refuse_unread("is not a known argument; remove it if it changes neither time nor memory")


def _take_shapes(arguments: Section) -> None:
    translation = arguments.translation
    for key, name in (
        ("num_layers", "num_layers"),
        ("hidden_size", "hidden_size"),
        ("num_attention_heads", "num_attention_heads"),
        ("kv_channels", "head_dim"),
        ("seq_length", "seq_length"),
    ):
        if arguments.get(key) is not None:
            arguments.take(key, ("model", name))
    groups = arguments.get("num_query_groups")
    if arguments.boolean("group_query_attention"):
        translation.put(("model", "num_query_groups"), groups or 1, arguments.at("num_query_groups"))
    norm = arguments.choice("normalization", NORMS, "LayerNorm")
    translation.put(("model", "norm"), norm, arguments.at("normalization"))
    position = arguments.choice("position_embedding_type", POSITIONS, "learned_absolute")
    position = "rope" if arguments.boolean("use_rotary_position_embeddings") else position
    translation.put(("model", "position"), position, arguments.at("position_embedding_type"))
    reach, fraction = arguments.get("max_position_embeddings"), arguments.get("rotary_percent")
    if position == "learned" and reach is not None:
        arguments.take("max_position_embeddings", ("model", "max_position_embeddings"))
    if position == "rope" and fraction is not None:
        arguments.take("rotary_percent", ("model", "rotary_fraction"))
    bias = not arguments.boolean("disable_bias_linear")
    translation.put(("model", "qkv_bias"), bias or arguments.boolean("add_qkv_bias"), arguments.at("add_qkv_bias"))
    translation.put(("model", "attention_output_bias"), bias)
    translation.put(("model", "mlp_bias"), bias)
    translation.put(("model", "qk_norm"), "head" if arguments.boolean("qk_layernorm") else "none")
    translation.put(("model", "tie_embeddings"), not arguments.boolean("untie_embeddings_and_output_weights"))


def _take_vocabulary(arguments: Section, given: Mapping[str, Any]) -> None:
    """Set the vocabulary's size, padded as Megatron pads it: to a multiple of 128, unless another is given."""
    size = arguments.integer("vocab_size", largest=1 << 24)
    multiple = arguments.integer("make_vocab_size_divisible_by", 128) or 1
    padded = arguments.integer("padded_vocab_size", largest=1 << 24)
    if padded is None and size is not None:
        padded = -(-size // multiple) * multiple
    if padded is not None:
        arguments.translation.put(("model", "vocab_size"), padded, arguments.at("vocab_size"))
    elif "vocab_size" not in given:
        arguments.refuse("vocab_size", "is missing: the tokenizer decides it, so give it here, or as model.vocab_size")


def _take_ffn(arguments: Section) -> None:
    translation = arguments.translation
    default = "swiglu" if arguments.boolean("swiglu") else "gelu"
    activation, gated = arguments.choice("activation", ACTIVATIONS, default)
    translation.put(("model", "activation"), activation, arguments.at("activation"))
    translation.put(("model", "gated_mlp"), gated)
    width, hidden = arguments.get("ffn_hidden_size"), arguments.integer("hidden_size") or 0
    if width is None:
        width = int(4 * hidden * 2 / 3 / 64) * 64 if default == "swiglu" else 4 * hidden
    translation.put(("model", "ffn_hidden_size"), width, arguments.at("ffn_hidden_size"))
    num_experts = arguments.get("num_experts")
    if num_experts is None:
        arguments.ignore([key for key in arguments.values if key.startswith("moe_")])
        return
    if not arguments.boolean("disable_bias_linear"):
        arguments.refuse("disable_bias_linear", "must be set: biases in experts are not supported")
    arguments.take("num_experts", ("model", "moe", "num_experts"))
    arguments.take("moe_router_topk", ("model", "moe", "top_k"), 2)
    arguments.take("moe_ffn_hidden_size", ("model", "moe", "expert_ffn_hidden_size"), width)
    if arguments.get("moe_shared_expert_intermediate_size") is not None:
        target = ("model", "moe", "shared_expert_ffn_hidden_size")
        arguments.take("moe_shared_expert_intermediate_size", target)
    normalised = not arguments.boolean("moe_router_pre_softmax")
    translation.put(("model", "moe", "norm_topk_prob"), normalised, arguments.at("moe_router_pre_softmax"))
    _take_capacity(arguments)
    _take_expert_layers(arguments)


def _take_capacity(arguments: Section) -> None:
    """Set the capacity of experts. As in Megatron, the other flags of capacity have no effect without it."""
    others = ("moe_token_drop_policy", "moe_pad_expert_input_to_capacity")
    if arguments.get("moe_expert_capacity_factor") is None:
        arguments.ignore(others)
        return
    arguments.take("moe_expert_capacity_factor", ("model", "moe", "capacity_factor"))
    arguments.choice("moe_token_drop_policy", {"probs": None}, "probs")
    if arguments.boolean("moe_pad_expert_input_to_capacity"):
        reason = "is not supported: experts with a capacity are not padded to it"
        arguments.refuse("moe_pad_expert_input_to_capacity", reason)


def _take_expert_layers(arguments: Section) -> None:
    layers, frequency = arguments.integer("num_layers", largest=4096), arguments.get("moe_layer_freq", 1)
    if isinstance(frequency, str) and re.fullmatch(r"\[\s*[01](\s*,\s*[01])*\s*\]", frequency):
        frequency = [int(digit) for digit in re.findall("[01]", frequency)]
    if isinstance(frequency, int) and not isinstance(frequency, bool) and frequency > 0 and layers:
        frequency = [int(index % frequency == 0) for index in range(layers)]
    kinds = list(map(bool, frequency)) if isinstance(frequency, list | tuple) else []
    pattern = find_layer_pattern(kinds) if len(kinds) == layers else None
    if pattern is None:
        reason = "must be a number, or a list of 0 and 1 for the layers: dense ones, then experts in every n-th layer"
        arguments.refuse("moe_layer_freq", reason)
        return
    arguments.translation.put(("model", "moe", "first_k_dense"), pattern[0], arguments.at("moe_layer_freq"))
    arguments.translation.put(("model", "moe", "moe_layer_frequency"), pattern[1], arguments.at("moe_layer_freq"))


def _take_batch(arguments: Section, *, is_shared: bool) -> None:
    if arguments.get("global_batch_size") is not None:
        arguments.take("global_batch_size", ("batch_size",))
    micro = arguments.get("micro_batch_size")
    if isinstance(micro, int) and is_shared:
        arguments.translation.notes.append(
            f"micro_batch_size is open: the arguments have {micro}, and the base of meshes is the plainest that fits"
        )
    elif isinstance(micro, int):
        arguments.take("micro_batch_size", ("base_micro_batch_size",))
    elif micro is not None:
        arguments.take("micro_batch_size", ("micro_batch_size",))


def _take_training(arguments: Section) -> None:
    translation = arguments.translation
    brain, half = arguments.boolean("bf16"), arguments.boolean("fp16")
    if brain and half:
        arguments.refuse("fp16", "contradicts bf16")
    translation.put(("model", "dtype"), "bfloat16" if brain else "float16" if half else "float32")
    if brain and not arguments.boolean("grad_reduce_in_bf16"):
        translation.put(("training", "optimizer", "grad_dtype"), "float32")
    optimizer = arguments.choice("optimizer", OPTIMIZERS, "adam")
    translation.put(("training", "optimizer", "name"), optimizer, arguments.at("optimizer"))
    level, key = _choose_sharding(arguments)
    translation.put(("training", "sharding"), level, arguments.at(key))


def _choose_sharding(arguments: Section) -> tuple[str, str]:
    """Return the level of sharding, and the argument that sets it."""
    strategy = arguments.choice("data_parallel_sharding_strategy", STRATEGIES, "no_shard")
    choices = (
        ("use_megatron_fsdp", strategy, "data_parallel_sharding_strategy"),
        ("use_custom_fsdp", strategy, "data_parallel_sharding_strategy"),
        ("use_torch_fsdp2", "zero3", "use_torch_fsdp2"),
        ("use_distributed_optimizer", "zero1", "use_distributed_optimizer"),
    )
    on = [(level, key) for flag, level, key in choices if arguments.boolean(flag)]
    return on[0] if on else ("none", "use_distributed_optimizer")


def _take_recomputation(arguments: Section, stated: Mapping[str, Any], *, is_shared: bool) -> None:
    """Note the recomputation of the arguments, and add it to the explored policies if it is none of them."""
    translation = arguments.translation
    choices = {"recompute_granularity": ("none", "selective", "full"), "recompute_method": ("uniform", "block")}
    named = {
        key: arguments.choice(key, {name: name for name in names}, names[0])
        for key, names in choices.items()
        if arguments.get(key) is not None
    }
    layers = arguments.integer("recompute_num_layers")
    selective = arguments.values.get("recompute_activations")
    arguments.ignore({"recompute_activations", "recompute_modules"})
    words = list(named.values()) or (["selective"] if selective else [])
    if not words:
        return
    how = shortened(" ".join([*words, *([f"with {layers} layers"] if layers else [])]), 80)
    policy = None
    if named.get("recompute_granularity") == "full" and layers and not is_shared and not stated["recompute"]:
        policy = _numbered_policy(named.get("recompute_method"), layers, translation)
    if policy is None:
        translation.notes.append(
            f"recomputation is open: the arguments have {how}, and every policy without a number is explored"
        )
        return
    policies = [
        one.value
        for one in ON_DEVICE
        if (one is not Recompute.EXPERTS or translation.get("model", "moe") is not None)
        and not (one.by_operation and stated["execution"] not in (None, "eager"))
    ]
    translation.put(("recompute",), [*policies, policy], arguments.at("recompute_num_layers"))
    translation.notes.append(
        f"recomputation is open: the arguments have {how}, and '{policy}' is explored with every other policy"
    )


def _numbered_policy(method: str | None, layers: int, translation: Translation) -> str | None:
    """Return the policy of Megatron's method and number of layers; None if a policy without a number means the same.

    `block` recomputes the first layers, each by itself. `uniform` recomputes chunks of layers, each as one. More layers
    than there are mean all of them.
    """
    total = translation.get("model", "num_layers")
    most = total if isinstance(total, int) else 0
    if method == "block" and layers < most:
        return f"layers_{layers}"
    shards = translation.get("training", "sharding") in ("zero2", "zero3")
    size = min(layers, most)
    return f"groups_{size}" if method == "uniform" and size > 1 and not shards else None


IGNORED = because(
    {
        "values of parameters and of the optimizer; dropout, which no exploration runs": (
            "hidden_dropout attention_dropout ffn_dropout weight_decay clip_grad init_method_std norm_epsilon "
            "layernorm_epsilon adam_beta1 adam_beta2 adam_eps sgd_momentum seed apply_layernorm_1p "
            "init_method_xavier_uniform start_weight_decay end_weight_decay calculate_per_token_loss min_lr "
            "override_opt_param_scheduler use_checkpoint_opt_param_scheduler min_loss_scale initial_loss_scale "
            "loss_scale loss_scale_window hysteresis use_mup"
        ),
        "the angles of rotary embeddings": (
            "rotary_base rotary_interleaved rope_scaling_factor use_rope_scaling rotary_seq_len_interpolation_factor "
            "no_position_embedding no_rope_fusion"
        ),
        "how Megatron computes the same; here the kernel is explored": (
            "use_flash_attn attention_backend use_mcore_models transformer_impl spec sequence_parallel "
            "attention_softmax_in_fp32 apply_query_key_layer_scaling cross_entropy_loss_fusion "
            "cross_entropy_fusion_impl no_masked_softmax_fusion no_bias_gelu_fusion no_bias_swiglu_fusion "
            "no_bias_dropout_fusion no_persist_layer_norm no_gradient_accumulation_fusion openai_gelu "
            "accumulate_allreduce_grads_in_fp32 overlap_grad_reduce overlap_param_gather enable_cuda_graph "
            "tp_comm_overlap no_async_tensor_model_parallel_allreduce use_legacy_models deterministic_mode "
            "ddp_bucket_size ddp_average_in_collective align_param_gather manual_gc manual_gc_interval"
        ),
        "the router's losses, and how Megatron computes the experts": (
            "moe_grouped_gemm moe_token_dispatcher_type moe_router_load_balancing_type moe_aux_loss_coeff "
            "moe_z_loss_coeff moe_router_dtype moe_permute_fusion moe_router_score_function moe_shared_expert_overlap "
            "moe_per_layer_logging moe_router_topk_scaling_factor moe_layer_recompute moe_router_enable_expert_bias "
            "moe_router_bias_update_rate moe_input_jitter_eps moe_enable_deepep moe_router_fusion"
        ),
        "data, the number of steps, and files": (
            "empty_unused_memory_level no_mmap_bin_files train_iters train_samples exit_interval exit_duration_in_mins "
            "exit_signal_handler split vocab_file merge_file mock_data num_workers mmap_bin_files "
            "num_dataset_builder_threads reset_position_ids reset_attention_mask eod_mask_loss "
            "no_create_attention_mask_in_dataloader dataloader_type decoder_seq_length bert_load use_dist_ckpt "
            "async_save finetune local_rank distributed_backend distributed_timeout_minutes rampup_batch_size profile"
        ),
    }
)
"""Arguments that change neither time nor memory, by their meaning."""

IGNORED_PREFIXES = tuple(
    words(
        """
        lr log_ save load no_load_ no_save_ eval_ ckpt_ tensorboard_ wandb_ one_logger_ tokenizer_ tiktoken_
        decoupled_ data_path data_cache data_args train_data valid_data test_data per_split_data timing_ rerun_
        check_for_ profile_ distributed_timeout dist_ckpt auto_detect_ckpt
        """
    )
)
"""Beginnings of names that stand for learning rates, records, files, data and tokens."""

REFUSED = {
    "num_layers_per_virtual_pipeline_stage": "pipeline parallelism is not supported",
    "virtual_pipeline_model_parallel_size": "pipeline parallelism is not supported",
    "multi_latent_attention": "multi-head latent attention (MLA) is not supported",
    "squared_relu": "squared ReLU is not supported",
    "fp8_format": "FP8 is not supported",
    "fp8": "FP8 is not supported",
    "fp8_param_gather": "FP8 is not supported",
    "fp4_format": "FP4 is not supported",
    "moe_latent_size": "latent experts are not supported",
    "mtp_num_layers": "multi-token prediction layers are not supported",
    "window_size": "sliding-window attention is not supported",
    "window_attn_skip_freq": "sliding-window attention is not supported",
    "cpu_offloading": "offloading is not supported",
    "optimizer_cpu_offload": "offloading is not supported",
    "hybrid_override_pattern": "state-space layers are not supported",
    "encoder_num_layers": "encoder-decoder models are not supported: only decoder-only models are",
    "decoder_num_layers": "encoder-decoder models are not supported: only decoder-only models are",
    "apply_residual_connection_post_layernorm": "norms after the blocks are not supported",
    "use_precision_aware_optimizer": "moments in other formats are read from training.optimizer only",
    "heterogeneous_layers_config_path": "layers of different shapes are not supported",
}
"""Arguments that an exploration cannot honour, and why."""
