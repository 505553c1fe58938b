"""torchtitan: sequences in a release, tokens on the main line, and a mesh."""

from __future__ import annotations

import shlex

import pytest

from bexp.explorer.exports.export import export
from bexp.explorer.model.training import Sharding
from bexp.explorer.trainers.document import ExportError
from tests.explorer.exports.samples import SHARDED, exploration, own_exploration
from tests.explorer.exports.test_formats import FULL, flags
from tests.explorer.exports.test_meshes import pairs, planned


def test_torchtitans_main_line_counts_the_tokens_of_a_targets_own_sequences() -> None:
    main = flags(export("torchtitan-main", own_exploration(seq_length=64)), "TORCHTITAN_FLAGS")
    assert main[1:6:2] == [str(4 * 64), "64", str(16 * 64)]
    with pytest.raises(ExportError, match="no seq_length"):
        export("torchtitan-main", own_exploration(seq_length=1))


def test_torchtitan_counts_sequences_in_a_release_and_tokens_on_the_main_line() -> None:
    answer = exploration(FULL, **SHARDED)
    release = flags(export("torchtitan", answer), "TORCHTITAN_FLAGS")
    main = flags(export("torchtitan-main", answer), "TORCHTITAN_FLAGS")
    batch = ["--training.local_batch_size", "8", "--training.global_batch_size", "512", "--training.seq_len", "4096"]
    assert release[:6] == batch
    assert main[:6] == [
        "--training.num_tokens_per_microbatch_per_dp_rank",
        str(8 * 4096),
        "--training.max_context_length",
        "4096",
        "--training.num_tokens_per_train_step",
        str(512 * 4096),
    ]
    assert release[6:] == main[6:]
    assert release[-1] == "activation_checkpoint:full"
    assert shlex.join(["--parallelism.fsdp_reshard_after_forward", "always"]) in shlex.join(release)
    assert "--compile.no-enable" in release


def test_torchtitan_is_told_the_mesh() -> None:
    release = pairs(flags(export("torchtitan", planned(sharding=Sharding.ZERO3)), "TORCHTITAN_FLAGS"))
    common = {
        "--parallelism.tensor_parallel_degree": "2",
        "--parallelism.pipeline_parallel_degree": "2",
        "--parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
        "--parallelism.expert_parallel_degree": "4",
        "--parallelism.data_parallel_shard_degree": "8",
    }
    assert common.items() <= release.items()
    assert release["--training.local_batch_size"] == "64"
    assert release["--parallelism.pipeline_parallel_microbatch_size"] == "4"
    main = pairs(flags(export("torchtitan-main", planned(sharding=Sharding.ZERO3)), "TORCHTITAN_FLAGS"))
    assert common.items() <= main.items()
    assert main["--training.num_tokens_per_microbatch_per_dp_rank"] == str(4 * 128)


@pytest.mark.parametrize(("precision", "dtype"), [("pure", "bfloat16"), ("autocast", "float32"), ("master", "float32")])
def test_torchtitan_is_told_the_format_of_the_weights(precision: str, dtype: str) -> None:
    for name in ("torchtitan", "torchtitan-main"):
        assert f"--training.dtype {dtype}" in export(name, exploration(training={"precision": precision})).text
    assert "--training.dtype" not in export("torchtitan", own_exploration(512)).text
