"""Which settings a job may choose among, where packages are missing, present, or broken."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.kernels import Kernels
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.model.hardware import NAME_IT
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import enumerate_candidates
from bexp.kernels.builds import Experts
from bexp.kernels.shapes import ExpertsShape
from bexp.transformers.settings import Settings
from bexp.workers.instruments.kernel_builder import KernelBuilder
from bexp.workers.targets.transformers.builder import PartsBuilder
from bexp.workers.targets.transformers.passes import LayerPasses, settings_of
from bexp.workers.targets.transformers.probe import SettingsProbe
from bexp.workers.targets.transformers.resolved import ResolvedModel, resolve
from bexp.workers.targets.transformers.target import BUILT_SIZES, describe_parts
from tests.bexp.transformers import fake_liger
from tests.workers.targets.transformers.targets import CPU, HARDWARE, LLAMA, QWEN_MOE, open_target, request_for

pytest.importorskip("transformers")

NAMES = ("flash_attention_2", "flash_attention_3")


@pytest.fixture(scope="module")
def resolved() -> ResolvedModel:
    return resolve(LLAMA, 16)


@pytest.fixture(scope="module")
def builder(resolved: ResolvedModel) -> PartsBuilder:
    return resolved.builder(CPU)


def install_flash(monkeypatch: pytest.MonkeyPatch, *versions: int) -> None:
    """Let transformers find these versions of flash-attention, and no other."""
    modeling: Any = import_module("transformers.modeling_utils")
    entries = {
        version: {**entry, "general_availability_check": lambda version=version: version in versions}
        for version, entry in modeling.FLASH_ATTENTION_COMPATIBILITY_MATRIX.items()
    }
    monkeypatch.setattr(modeling, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", entries)


def test_graphs_are_reported_if_a_request_admits_them(resolved: ResolvedModel, builder: PartsBuilder) -> None:
    asked = SettingsProbe(resolved, builder, request_for(execution="explore")).execution_supports()
    assert {support.name for support in asked if support.usable} == {"eager", "compile"}
    assert SettingsProbe(resolved, builder, request_for(execution="compile")).execution_supports() == ()


def test_a_setting_that_runs_out_of_memory_is_left_to_its_trials(
    monkeypatch: pytest.MonkeyPatch, resolved: ResolvedModel, builder: PartsBuilder
) -> None:
    reasons = []
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("no kernel")):
        monkeypatch.setattr(LayerPasses, "forward", Mock(side_effect=error))
        reasons.append(SettingsProbe(resolved, builder, request_for()).refusal(Settings(attention="sdpa")))
    assert reasons == [None, "no kernel"]


def test_an_own_choice_that_is_flash_attention_gives_way_where_that_is_excluded(
    resolved: ResolvedModel, builder: PartsBuilder
) -> None:
    def usable(**fields: Any) -> set[str]:
        found = SettingsProbe(resolved, builder, request_for(**fields)).attention_supports()
        return {support.name for support in found if support.usable and not support.only_when_named}

    assert usable() == {"sdpa"}
    assert usable(flash_attention=False) == {"sdpa:math"}, "on the CPU sdpa takes flash, and there is one other"


@pytest.mark.parametrize("versions", [(), (2,), (3,), (2, 3)])
def test_flash_attention_is_there_only_where_transformers_can_import_it(
    monkeypatch: pytest.MonkeyPatch, resolved: ResolvedModel, versions: tuple[int, ...]
) -> None:
    install_flash(monkeypatch, *versions)
    found = resolved.attention_implementations
    assert {name for name in NAMES if found[name] is None} == {f"flash_attention_{version}" for version in versions}
    refused = [str(found[name]) for name in NAMES if found[name] is not None]
    assert all("doesn't seem to be installed" in reason for reason in refused)


def test_a_flash_attention_that_fails_to_import_is_left_out_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, resolved: ResolvedModel, builder: PartsBuilder
) -> None:
    install_flash(monkeypatch, 2, 3)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))  # of another version
    asked = request_for(attention_backends=["sdpa", "flash_attention_3"])
    found = {each.name: each for each in SettingsProbe(resolved, builder, asked).attention_supports()}
    assert not found["flash_attention_3"].usable
    assert "cannot import name 'flash_attn_func' from 'flash_attn_interface'" in str(found["flash_attention_3"].reason)
    assert found["flash_attention_2"].reason == NAME_IT
    assert found["sdpa"].usable


@pytest.mark.parametrize(
    ("device", "fields", "tried"),
    [
        ("cuda", {}, True),
        ("cpu", {}, False),
        ("cuda", {"quick": True}, False),
        ("cuda", {"flash_attention": False}, False),
    ],
)
def test_an_installed_flash_attention_is_in_the_default_space_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    resolved: ResolvedModel,
    builder: PartsBuilder,
    device: str,
    fields: dict[str, Any],
    tried: bool,
) -> None:
    install_flash(monkeypatch, 2)
    probe = SettingsProbe(resolved, builder, request_for(**fields))
    monkeypatch.setattr(probe, "_device", torch.device(device))
    monkeypatch.setattr(probe, "refusal", lambda settings: None)
    found = {each.name: each for each in probe.attention_supports()}
    two, three = found["flash_attention_2"], found["flash_attention_3"]
    assert (two.usable, two.only_when_named) == (tried, not tried)
    assert not three.usable, "it is not installed"
    assert not two.stock, "torch itself has no such kernel"
    assert three.only_when_named


def space(resolved: ResolvedModel, builder: PartsBuilder, asked: ExplorationRequest) -> tuple[Candidate, ...]:
    """The legal space of a request, by what the probe finds."""
    probe = SettingsProbe(resolved, builder, asked)
    report = DeviceReport(
        hardware=HARDWARE,
        attention_backends=probe.attention_supports(),
        choices=probe.choice_supports(),
        default_attention="sdpa",
        parts=describe_parts(resolved, tiles="none", checkpointing=None, named={}),
    )
    assert report.parts is not None
    return enumerate_candidates(asked, report, report.parts).candidates


def test_ligers_kernels_double_the_space_where_they_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, resolved: ResolvedModel, builder: PartsBuilder
) -> None:
    calls = fake_liger.install(monkeypatch)
    asked = request_for(kernels=["liger", "library"], micro_batch_size=2, recompute=["none"])
    found = space(resolved, builder, asked)
    assert [candidate.kernels for candidate in found] == [*Kernels]
    assert [settings_of(candidate, asked).kernels for candidate in found] == ["library", "liger"]
    assert calls == {"norm": 2, "gated": 1, "rotation": 1}


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ({"norm_factor": 1.5}, r"output 0: off by .* with these kernels"),
        ({"fails": True}, "liger-kernel fails on LlamaDecoderLayer"),
        (None, "pip install liger-kernel"),
    ],
)
def test_ligers_kernels_are_left_out_with_the_reason_or_refused_if_they_are_the_only_choice(
    monkeypatch: pytest.MonkeyPatch,
    resolved: ResolvedModel,
    builder: PartsBuilder,
    installed: dict[str, Any] | None,
    reason: str,
) -> None:
    if installed is None:
        monkeypatch.setitem(sys.modules, "liger_kernel", None)
    else:
        fake_liger.install(monkeypatch, **installed)
    both = request_for(kernels=["library", "liger"], micro_batch_size=2)
    assert {candidate.kernels for candidate in space(resolved, builder, both)} == {Kernels.LIBRARY}
    with pytest.raises(EmptySpaceError, match=f"no usable kernels with .* \\(liger: .*{reason}"):
        space(resolved, builder, request_for(kernels=["liger"], micro_batch_size=2))


def test_ligers_loss_is_a_choice_where_it_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, resolved: ResolvedModel, builder: PartsBuilder
) -> None:
    fake_liger.install(monkeypatch)
    asked = request_for(losses=["liger", "library"], micro_batch_size=2, recompute=["none"])
    found = space(resolved, builder, asked)
    assert [settings_of(candidate, asked).loss for candidate in found] == ["library", "liger"]
    fake_liger.install(monkeypatch, norm_factor=1.5)
    assert {candidate.loss for candidate in space(resolved, builder, asked)} == {"library"}
    with pytest.raises(EmptySpaceError, match=r"no usable loss with .* \(liger: loss: off by"):
        space(resolved, builder, request_for(losses=["liger"], micro_batch_size=2))


class NotedBuilder(KernelBuilder):
    """Notes what it would build, and whether somebody has waited for it."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.experts: list[Experts] = []
        self.has_waited = False

    def order(self, experts: Sequence[Experts]) -> None:
        self.experts += experts

    def wait(self) -> None:
        self.has_waited = True


@pytest.mark.parametrize(
    ("config", "fields", "expected"),
    [
        (QWEN_MOE, {}, ExpertsShape(64, 32, 4, 2, torch.bfloat16)),
        (QWEN_MOE, {"expert_backends": ["grouped_mm"]}, None),
        (LLAMA, {}, None),
    ],
)
def test_expert_kernels_are_ordered_for_the_models_shapes(
    config: dict[str, Any], fields: dict[str, Any], expected: ExpertsShape | None
) -> None:
    target, builder = open_target(config, **fields), NotedBuilder()
    target._instruments.kernels = builder
    target.report(HARDWARE)
    sizes = tuple(16 * size for size in BUILT_SIZES)
    assert builder.experts == ([] if expected is None else [Experts(expected, sizes, transposed=True)])
    assert builder.has_waited
