"""The answers whose exports the frameworks read."""

from __future__ import annotations

from bexp.explorer.dimensions.parallelism import Schedule
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.training import Sharding
from tests.explorer.exports.samples import CONFIG, SHARDED, candidate, exploration
from tests.explorer.exports.simulated import simulated
from tests.explorer.exports.test_meshes import planned

FLAT = {"pipeline": 1, "virtual_stages": 1, "schedule": None}

ANSWERS = {
    "plain": exploration(),
    "replaced": simulated(22, losses=["library", "chunked"]).source,
    "autocast": exploration(training={"precision": "autocast"}),
    "master": exploration(training={"precision": "master"}),
    "lora": exploration(training={"lora": {"r": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}}),
    "lora_all": exploration(training={"lora": {"r": 8, "target_modules": "linear-modules"}}),
    "qlora": exploration(quantization="bnb_4bit", training={"lora": {"r": 8, "target_modules": "linear-modules"}}),
    "lora_8bit": exploration(
        quantization="bnb_8bit",
        training={
            "lora": {
                "r": 8,
                "target_modules": ["q_proj"],
                "modules_to_save": ["lm_head"],
                "use_dora": True,
                "use_rslora": True,
            }
        },
    ),
    "lora_experts": exploration(training={"lora": {"r": 8, "target_parameters": ["experts.down_proj"]}}),
    "sgd": exploration(training={"optimizer": {"name": "sgd"}}),
    "muon": exploration(
        candidate(expert_backend=None),
        hf_config={**CONFIG, "num_experts": 1},
        training={"optimizer": {"name": "muon"}},
    ),
    "no_batch": exploration(batch_size=None),
    "recomputed": exploration(candidate(recompute=Recompute.FULL)),
    "partial": exploration(candidate(recompute=Recompute.PARTIAL_25)),
    "selective": exploration(candidate(recompute=Recompute.SELECTIVE)),
    "compiled": exploration(execution="compile"),
    "expandable": exploration(allocator="expandable_segments"),
    "chunked": exploration(candidate(loss="chunked"), losses=["library", "chunked"]),
    "pinned": exploration(candidate(attention_backend="sdpa:cudnn")),
    "zero1": exploration(num_devices=8, training={"sharding": "zero1"}),
    "zero2": exploration(num_devices=8, training={"sharding": "zero2"}),
    "zero3": exploration(candidate(recompute=Recompute.FULL), **SHARDED),
    "shared": exploration(
        candidate(context_parallel_size=2, context_parallel_layout="zigzag"),
        num_devices=8,
        context_parallel={"sizes": [2]},
    ),
    "interleaved": planned(),
    "piped": planned(virtual_stages=1, schedule=Schedule.ONE_F_ONE_B, sharding=Sharding.NONE),
    "mesh_zero1": planned(**FLAT, data=16),
    "mesh_zero2": planned(**FLAT, data=16, expert=1, sharding=Sharding.ZERO2),
    "mesh_zero3": planned(**FLAT, data=16, expert=1, sharding=Sharding.ZERO3),
    "alone": planned(**FLAT, tensor=8, data=1, expert=1, sharding=Sharding.NONE),
}
"""Meshes are exported to the frameworks that can be told one."""
