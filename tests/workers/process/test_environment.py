from __future__ import annotations

from bexp.workers.process.environment import (
    CHILD_DEFAULTS,
    CPU_DEFAULTS,
    GROUP_DEFAULTS,
    OFFLINE,
    profiler_environment,
)
from bexp.workers.settings import LOCAL_TARGET

DEFAULTS = CHILD_DEFAULTS | OFFLINE


def test_defaults_yield_to_what_the_user_has_set() -> None:
    environment = profiler_environment({"OMP_WAIT_POLICY": "ACTIVE", "HOME": "/root"}, ["cuda:0"])
    assert environment == DEFAULTS | {"OMP_WAIT_POLICY": "ACTIVE", "HOME": "/root"}
    assert profiler_environment({}, ["cuda:0", "cuda:1"]) == DEFAULTS | GROUP_DEFAULTS
    assert profiler_environment({}, ["cpu"]) == DEFAULTS | CPU_DEFAULTS


def test_a_profiler_has_neither_the_database_nor_the_token() -> None:
    secret = {"BEXP_DATABASE_URL": "postgresql://me:secret@db/bexp", "BEXP_API_TOKEN": "secret"}
    assert profiler_environment(secret, ["cuda:0"]) == DEFAULTS


def test_only_a_persons_own_code_has_the_password_that_libpq_reads() -> None:
    secret = {"PGPASSWORD": "secret", "PGPASSFILE": "/run/secrets/pgpass"}
    assert profiler_environment(secret, ["cuda:0"]) == DEFAULTS
    assert (
        profiler_environment({**secret, LOCAL_TARGET: "/home/me/train.py:Target"}, ["cuda:0"]).items() >= secret.items()
    )


def test_the_newer_name_of_the_allocator_setting_replaces_the_default() -> None:
    newer = {"PYTORCH_ALLOC_CONF": "backend:native"}
    assert "PYTORCH_CUDA_ALLOC_CONF" not in profiler_environment(newer, ["cuda:0"])
    both = newer | {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    assert profiler_environment(both, ["cuda:0"])["PYTORCH_CUDA_ALLOC_CONF"] == "backend:cudaMallocAsync"


def test_nothing_is_fetched_but_by_a_persons_own_code() -> None:
    own = {LOCAL_TARGET: "/home/me/train.json:command"}
    assert profiler_environment({}, ["cpu"]).items() >= OFFLINE.items()
    assert profiler_environment(own, ["cpu"]).keys().isdisjoint(OFFLINE)
    assert profiler_environment({**own, "HF_HUB_OFFLINE": "1"}, ["cpu"])["HF_HUB_OFFLINE"] == "1"
    assert profiler_environment({LOCAL_TARGET: ""}, ["cpu"]).items() >= OFFLINE.items()
