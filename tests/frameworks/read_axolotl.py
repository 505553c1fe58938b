"""Reads files with Axolotl's schema; none of their keys may be unknown to it."""

import sys
from pathlib import Path

import yaml
from axolotl.utils.schemas.config import AxolotlInputConfig

for path in sorted(Path(sys.argv[1]).iterdir()):
    values = yaml.safe_load(path.read_text())
    assert set(values) <= set(AxolotlInputConfig.model_fields), path.name
    found = AxolotlInputConfig(
        base_model="model", datasets=[{"path": "data", "type": "alpaca"}], learning_rate=1e-4, **values
    )
    assert found.micro_batch_size == values["micro_batch_size"]
    assert found.sequence_len == values["sequence_len"]
    assert (found.bf16, found.bfloat16) == (True, None), path.name
    assert found.optimizer == {".sgd": "sgd", ".muon": "muon"}.get(path.suffix, "adamw_torch_fused")
    assert found.optim_args == ("momentum=0.9" if path.suffix == ".sgd" else None)
    assert found.gradient_checkpointing is (path.suffix in {".recomputed", ".partial", ".selective"}), path.name
    if path.suffix == ".zero3":
        assert found.fsdp_config.activation_checkpointing
    if "lora" in path.suffix:
        assert (found.adapter, found.lora_r) == ("qlora" if path.suffix == ".qlora" else "lora", 8)
        assert (found.load_in_4bit, found.load_in_8bit) == (path.suffix == ".qlora", path.suffix == ".lora_8bit")
        is_eight = path.suffix == ".lora_8bit"
        assert (found.peft_use_dora, found.peft_use_rslora) == ((True, True) if is_eight else (None, None))
        assert found.lora_modules_to_save == (["lm_head"] if is_eight else None)
        experts = ["experts.down_proj"] if path.suffix == ".lora_experts" else None
        assert found.lora_target_parameters == experts
        assert found.lora_alpha == (16 if path.suffix == ".lora" else 8)
        assert found.lora_target_linear is (True if path.suffix in {".lora_all", ".qlora"} else None)
        modules = {".lora": ["q_proj", "v_proj"], ".lora_8bit": ["q_proj"]}.get(path.suffix)
        assert found.lora_target_modules == modules
    else:
        assert found.adapter is None

for path in sorted((Path(sys.argv[1]).parent / "own").iterdir()):
    values = yaml.safe_load(path.read_text())
    found = AxolotlInputConfig(**values)
    assert (found.micro_batch_size, found.gradient_accumulation_steps) == (8, 2), path.name
    assert found.sample_packing is values["sample_packing"]
    assert (found.attn_implementation, found.gradient_checkpointing) == ("sdpa", False)
