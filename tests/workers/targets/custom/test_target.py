"""What is measured of a target that works."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.roofline import roofline_seconds
from bexp.explorer.model.model import DType
from bexp.explorer.model.target import LOCAL
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.process.profiler import Profiler
from bexp.workers.targets.choice import find_source
from bexp.workers.targets.custom.target import CustomTarget
from tests.workers.targets.custom.samples import HARDWARE, PLAIN, candidate, measure, open_custom, write

PARAMETER_BYTES = 4 * (64 * 64 + 64)


def test_a_model_that_is_all_shell_is_described_and_measured_whole(tmp_path: Path) -> None:
    target = open_custom(write(tmp_path, PLAIN))
    try:
        parts = target.report(HARDWARE).parts
        step, clock = measure(target, 4), PhaseClock()
        optimizer = target.measure_component(
            Component(kind=ComponentKind.OPTIMIZER, micro_batch_size=0), candidate(4), clock
        )
    finally:
        target.close()
    assert parts is not None
    assert (parts.layers, parts.kinds, parts.policies, parts.settings) == ((), (), ("none",), ())
    assert parts.measured == "local train.py:Target, Linear"
    assert parts.parameter_bytes == parts.trainable_bytes == parts.shell.parameter_bytes == PARAMETER_BYTES
    assert parts.seq_length == 1
    # The input belongs to the batch. A sequence adds its output, its square, and the gradient of either, at most.
    assert 0 < parts.shell.saved_bytes_per_token <= 5 * 4 * 64
    assert step.repeats >= 4
    assert step.device_seconds > step.forward_device_seconds > 0
    assert optimizer.device_seconds > 0
    assert optimizer.backward_peak_bytes == 0


@pytest.mark.usefixtures("in_process")
def test_dimensions_enter_the_configuration_and_each_choice_has_a_process_of_its_own(tmp_path: Path) -> None:
    source = PLAIN.replace(
        "class Target:", "class Target:\n        dimensions = {'width': [64, 256], 'bias': [True]}\n"
    )
    source = source.replace("nn.Linear(64, 64,", "nn.Linear(64, config['width'], bias=config['bias'] and config['on'],")
    target = open_custom(write(tmp_path, source), target_config={"on": True})
    try:
        parts = target.report(HARDWARE).parts
        assert parts is not None
        assert parts.settings == ("width=64 bias=true", "width=256 bias=true")
        narrow, first = measure(target, 8, parts.settings[0]), target._process
        wide = measure(target, 8, parts.settings[1])
        assert target._process is not first
        assert first is not None
        assert not first.alive
    finally:
        target.close()
    assert wide.backward_peak_bytes > 2 * narrow.backward_peak_bytes


@pytest.mark.usefixtures("in_process")
def test_too_many_choices_are_refused(tmp_path: Path) -> None:
    source = PLAIN.replace("class Target:", "class Target:\n        dimensions = {'a': range(9), 'b': range(9)}\n")
    with pytest.raises(UnsupportedTrialError, match="81 combinations; 1 to 64 can be explored"):
        open_custom(write(tmp_path, source)).report(HARDWARE)


@pytest.mark.usefixtures("in_process")
def test_the_peak_is_that_of_the_worst_batch_and_the_optimizer_is_the_targets_own(tmp_path: Path) -> None:
    source = (
        PLAIN
        + """
        def batch(self, micro_batch_size, device):
            return torch.randn(1, 64, device=device)  # texts of other lengths each time, packed into one row

        def worst_batch(self, micro_batch_size, device):
            return torch.randn(50 * micro_batch_size, 64, device=device)

        def optimizer(self, model):
            return torch.optim.SGD(model.parameters(), lr=1.0)
    """
    )
    target, plain = open_custom(write(tmp_path, source, "worst.py")), open_custom(write(tmp_path, PLAIN))
    try:
        target.report(HARDWARE)
        plain.report(HARDWARE)
        smaller, worst = (measure(target, size).backward_peak_bytes for size in (4, 8))
        usual = measure(plain, 8).backward_peak_bytes
    finally:
        target.close()
        plain.close()
    # SGD without momentum has no state; what AdamW keeps is more than the output of 8 rows and less than that of 400.
    # Both are beyond parameters, gradients and the two moments of AdamW, which the search knows of.
    assert worst > 50 * 8 * 64 * 4 - 2 * PARAMETER_BYTES
    assert worst > smaller
    assert usual < 50 * 8 * 64 * 4


def test_the_process_imports_bexp_and_the_folder_of_the_target_alone(tmp_path: Path) -> None:
    for name in ("api", "workers", "storage", "explorer", "bexp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'the person'")
    source = PLAIN.replace(
        "self.config = config",
        """
            import sys
            loaded = {name.partition('.')[0] for name in sys.modules} & {"api", "workers", "storage", "explorer"}
            assert not loaded, loaded
            import api, workers, storage, explorer, bexp.targets
            assert {module.OWNER for module in (api, workers, storage, explorer)} == {"the person"}
            assert isinstance(self, bexp.targets.Target)
    """,
    )
    target = open_custom(write(tmp_path, source))
    try:
        assert target.report(HARDWARE).parts is not None
    finally:
        target.close()


@pytest.mark.slow
def test_the_process_sees_no_secret_of_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"BEXP_DATABASE_URL": "postgresql://me:secret@db/bexp", "BEXP_API_TOKEN": "secret"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    told = tmp_path / "told"
    source = PLAIN.replace("self.config = config", f"import os; open({str(told)!r}, 'w').write(repr(dict(os.environ)))")
    monkeypatch.setenv("BEXP_LOCAL_TARGET", write(tmp_path, source))
    profiler = Profiler(["cpu"], lock_directory=tmp_path)
    try:
        profiler.start()
        assert profiler.begin(ExplorationRequest(target=LOCAL, target_config={})).parts is not None
    finally:
        profiler.close()
    environment = ast.literal_eval(told.read_text())
    assert environment["PATH"] == os.environ["PATH"]
    assert not {name for name, value in environment.items() if name in secrets or value in secrets.values()}


def test_a_target_is_found_by_its_file_or_among_the_installed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_gpt-2.5.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: my-gpt\nVersion: 2.5\n")
    points = [
        "my-gpt = my_gpt.training:Target",
        "bexp = my_gpt.training:Target",
        "local = x:Target",
        "local.a = x:Y",
        "Bad Name = x:Y",
    ]
    (package / "entry_points.txt").write_text("\n".join(["[bexp.targets]", *points]))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_source("my-gpt")
    assert (found.name, found.version, found.reference) == ("my-gpt", "2.5", "my_gpt.training:Target")
    with pytest.raises(UnsupportedTrialError, match=r"no target 'other'; it has bexp .*, my-gpt 2\.5"):
        find_source("other")
    for name in ("local", "local.a"):
        with pytest.raises(UnsupportedTrialError, match=f"no target '{name}'"):
            find_source(name)
    monkeypatch.setenv("BEXP_LOCAL_TARGET", "/home/me/Train 2.py:Target")
    for name in ("local", "local.train-2"):
        assert find_source(name).version == "Train 2.py:Target"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_roofline_of_a_command_takes_as_long_as_its_own_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Weights in float32 may be multiplied in bfloat16, which is many times as fast."""
    per_token, size = 1e-3, 4
    introduction = {
        **{"class_name": "Net", "dtype": dtype, "num_parameters": 1000, "parameter_bytes": 4000, "seq_length": 64},
        **{"trainable_bytes": 4000, "saved_bytes": 64, "seconds_per_token": per_token},
    }
    monkeypatch.setattr(CustomTarget, "_introduce_alive", lambda _: introduction)
    peaks = {DType.FLOAT32: 5e13, DType.BFLOAT16: 8e14}
    hardware = HARDWARE.model_copy(update={"matmul_flops_per_second": peaks, "memory_bandwidth_bytes_per_second": 4e12})
    target = open_custom(write(tmp_path, PLAIN))
    parts = target.report(hardware).parts
    assert parts is not None
    step = Component(kind=ComponentKind.SHELL, micro_batch_size=size)
    request = ExplorationRequest.model_validate({"target": LOCAL})
    expected = pytest.approx(per_token * size * 64, rel=0.01)
    assert roofline_seconds(step, parts, request, hardware).device == expected
