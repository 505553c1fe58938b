from __future__ import annotations

from bexp.workers.process.environment import CHILD_DEFAULTS, GROUP_DEFAULTS, profiler_environment


def test_defaults_yield_to_what_the_user_has_set() -> None:
    environment = profiler_environment({"OMP_WAIT_POLICY": "ACTIVE", "HOME": "/root"}, is_group=False)
    assert environment == CHILD_DEFAULTS | {"OMP_WAIT_POLICY": "ACTIVE", "HOME": "/root"}
    assert profiler_environment({}, is_group=True) == CHILD_DEFAULTS | GROUP_DEFAULTS


def test_the_newer_name_of_the_allocator_setting_replaces_the_default() -> None:
    newer = {"PYTORCH_ALLOC_CONF": "backend:native"}
    assert "PYTORCH_CUDA_ALLOC_CONF" not in profiler_environment(newer, is_group=False)
    both = newer | {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    assert profiler_environment(both, is_group=False)["PYTORCH_CUDA_ALLOC_CONF"] == "backend:cudaMallocAsync"
