"""Files that people train with, as the frameworks' own examples have them, and the config.json that they name."""

from __future__ import annotations

from typing import Any

import yaml

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

AXOLOTL = """\
base_model: models/Llama-3.2-1B  # a folder
model_type: AutoModelForCausalLM
tokenizer_type: AutoTokenizer
strict: false
datasets:
  - path: data/chats.jsonl
    type: chat_template
val_set_size: 0.02
dataset_prepared_path: prepared
output_dir: ./out
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
wandb_project:
wandb_name:
gradient_accumulation_steps: 8  # times two
micro_batch_size: 2
num_epochs: 2
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-5
train_on_inputs: false
bf16: auto
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: true
flash_attention: true
warmup_ratio: 0.05
saves_per_epoch: 1
evals_per_epoch: 4
weight_decay: 0.0
deepspeed:
special_tokens:
  pad_token: <|end_of_text|>
"""
AXOLOTL_QLORA = """\
base_model: models/Llama-3.2-1B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules:
  - q_proj
  - v_proj
  - down_proj
lora_modules_to_save: [embed_tokens]
peft_use_rslora: true
datasets:
  - path: data/pairs.jsonl
    type: alpaca
sequence_len: 2048
sample_packing: false
group_by_length: true
micro_batch_size: 4
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
learning_rate: 0.0002
bf16: true
gradient_checkpointing: true
attn_implementation: sdpa
"""
LLAMAFACTORY = """\
model_name_or_path: models/Llama-3.2-1B
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity
template: llama3
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/lora
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_steps: 20
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""
LLAMAFACTORY_FULL = """\
model_name_or_path: models/Llama-3.2-1B
stage: sft
do_train: true
finetuning_type: full
dataset: identity
template: llama3
cutoff_len: 4096
packing: true
output_dir: saves/full
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
optim: adafactor
pure_bf16: true
flash_attn: fa2
disable_gradient_checkpointing: false
"""
TRL = """\
# Model arguments
model_name_or_path: models/Llama-3.2-1B
dtype: bfloat16
attn_implementation: sdpa
use_peft: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.0
lora_target_modules: all-linear
use_dora: true
# Data arguments
dataset_name: local/chats
# SFT trainer arguments
bf16: true
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
max_length: 4096
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
eval_strategy: "no"
logging_steps: 5
output_dir: out
warmup_steps: 20
seed: 42
"""
TRL_FULL = """\
model_name_or_path: models/Llama-3.2-1B
dataset_name: local/chats
max_length: 2048
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
optim: adamw_torch
output_dir: out
"""
TORCHTUNE = """\
output_dir: /tmp/torchtune/lora
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  lora_rank: 64
  lora_alpha: 128
  lora_dropout: 0.0
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: models/Llama-3.2-1B/original/tokenizer.model
  max_seq_len: 2048
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: models/Llama-3.2-1B
  checkpoint_files: [model.safetensors]
  output_dir: ${output_dir}
  model_type: LLAMA3_2
resume_from_checkpoint: False
save_adapter_weights_only: False
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: False
seed: null
shuffle: True
batch_size: 4
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  weight_decay: 0.01
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
epochs: 1
max_steps_per_epoch: null
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: True
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
log_every_n_steps: 1
log_peak_memory_stats: True
device: cuda
dtype: bf16
enable_activation_checkpointing: False
enable_activation_offloading: False
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
"""
AXOLOTL_FSDP = """\
base_model: models/Llama-3.2-1B
datasets:
  - path: data/pairs.jsonl
    type: alpaca
output_dir: ./out
sequence_len: 2048
gradient_accumulation_steps: 4
micro_batch_size: 1
optimizer: adamw_torch_fused
learning_rate: 2e-5
bf16: auto
attn_implementation: sdpa
fsdp_version: 2
fsdp_config:
  offload_params: false  # there is room
  state_dict_type: FULL_STATE_DICT
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  reshard_after_forward: true
special_tokens:
  pad_token: <|end_of_text|>
"""
LLAMAFACTORY_ZERO3 = """\
model_name_or_path: models/Llama-3.2-1B
stage: sft
do_train: true
finetuning_type: full
deepspeed: zero3.json  # one of several
dataset: identity
template: llama3
cutoff_len: 2048
output_dir: saves/full
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
bf16: true
flash_attn: sdpa
use_reentrant_gc: false
"""
ZERO3: dict[str, Any] = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2},
    "zero_optimization": {
        **{"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"},
        **{"sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "prefetch_bucket_size": "auto"},
    },
}
"""DeepSpeed's JSON."""
FSDP2_LAUNCH: dict[str, Any] = {
    **{"compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "FSDP", "downcast_bf16": "no"},
    "fsdp_config": {
        **{"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False},
        **{"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
        **{"fsdp_cpu_ram_efficient_loading": True, "fsdp_activation_checkpointing": False},
    },
    **{"machine_rank": 0, "main_training_function": "main", "mixed_precision": "bf16", "num_machines": 1},
    **{"num_processes": 4, "rdzv_backend": "static", "same_network": True, "tpu_env": [], "use_cpu": False},
}
"""A configuration of `accelerate launch`."""
FILES: dict[str, tuple[str, str]] = {
    "axolotl": ("axolotl", AXOLOTL),
    "axolotl, QLoRA": ("axolotl", AXOLOTL_QLORA),
    "llamafactory": ("llamafactory", LLAMAFACTORY),
    "llamafactory, full": ("llamafactory", LLAMAFACTORY_FULL),
    "trl": ("trl", TRL),
    "trl, full": ("trl", TRL_FULL),
    "torchtune": ("torchtune", TORCHTUNE),
}
"""Each with the trainer whose it is."""


def beside_its_model(trainer: str, text: str, **changes: Any) -> dict[str, Any]:
    """The document that a command makes of a file, with other values in it; nested ones by dotted names."""
    values = yaml.safe_load(text)
    for name, value in changes.items():
        section, keys = values, name.split("__")
        for key in keys[:-1]:
            section = section.setdefault(key, {})
        section[keys[-1]] = value
    return {trainer: values, "model": CONFIG}
