from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from benchmarks import context_parallel_peers as peers
from benchmarks.context_parallel_peers import (
    PEERS,
    VARIANTS,
    PeerMissingError,
    describe_peer,
    flash_interface,
    peer_attention,
)

ROOT = Path(__file__).parents[2]
MODULE = """
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from .helpers import SCALE

def {function}(q, k, v, causal=False, group=None):
    out, lse, _, _ = _flash_attn_forward(q, k, v, 0.0, SCALE, causal)
    return out
"""


@pytest.fixture(autouse=True)
def _fresh() -> None:
    peers._load.cache_clear()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the same shape, whose own import would fail."""
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash_attn is installed")
    folder = tmp_path / "ring_flash_attn"
    folder.mkdir()
    (folder / "__init__.py").write_text("import a_module_that_does_not_exist\n")
    (folder / "helpers.py").write_text("SCALE = 0.5\n")
    for module, function in VARIANTS.values():
        (folder / f"{module}.py").write_text(MODULE.format(function=function))
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _reference(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output (B, S, H, D) and log-sum-exp (B, H, S) of grouped attention, with every score in memory."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("backend", ["flash", "math"])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_of_the_stand_in_are_attention(backend: str, causal: bool) -> None:
    num_keys = 24 if causal else 12
    q, dout = (_draw(2, 24, 4, 8, seed=i) for i in (0, 1))
    k, v = (_draw(2, num_keys, 2, 8, seed=i) for i in (2, 3))
    for x in (q, k, v):
        x.requires_grad_()
    expected, sums = _reference(q, k, v, 0.3, causal)
    grads = torch.autograd.grad(expected, (q, k, v), dout)
    module = flash_interface(backend)
    with torch.no_grad():
        found = module._flash_attn_forward(q, k, v, dropout_p=0.0, softmax_scale=0.3, causal=causal)
        assert len(found) == 4
        out, lse, _, _ = found
        places = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        module._flash_attn_backward(
            dout, q, k, v, out, lse, *places, dropout_p=0.0, softmax_scale=0.3, causal=causal, deterministic=False
        )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, sums)
    for place, grad in zip(places, grads, strict=True):
        torch.testing.assert_close(place, grad)


def test_gradients_are_written_into_parts_of_buffers() -> None:
    """As the striped variant asks for them where a later rank's keys come by: without the first query, the last key."""
    q, k, v, dout = (_draw(1, 9, 2, 8, seed=i) for i in range(4))
    module = flash_interface("math")
    out, lse, _, _ = module._flash_attn_forward(q[:, 1:], k[:, :-1], v[:, :-1], 0.0, 0.3, True)
    buffers = [torch.zeros_like(x) for x in (q, k, v)]
    parts = (buffers[0][:, 1:], buffers[1][:, :-1], buffers[2][:, :-1])
    module._flash_attn_backward(dout[:, 1:], q[:, 1:], k[:, :-1], v[:, :-1], out, lse, *parts, 0.0, 0.3, True)
    assert not buffers[0][:, 0].any()
    assert not buffers[1][:, -1].any()
    assert all(part.any() for part in parts)


def test_the_stand_in_can_be_asked_for_its_parameters() -> None:
    """The caller sets those that it finds, by name, window sizes as two numbers."""
    module = flash_interface("flash")
    names = ("q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right")
    for function in (module._flash_attn_forward, module._flash_attn_backward):
        assert inspect.isfunction(function)
        assert {*names, "softcap", "alibi_slopes"} <= set(inspect.getfullargspec(function).args)
    with pytest.raises(AssertionError, match="plain attention"):
        module._flash_attn_forward(*(_draw(1, 4, 1, 8, seed=0),) * 3, 0.1, 0.3, True)


@pytest.mark.usefixtures("package")
def test_variants_run_on_the_stand_in_and_leave_no_module_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("ring_flash_attn.other")
    monkeypatch.setitem(sys.modules, "ring_flash_attn.other", other)
    q, k, v = (_draw(1, 6, heads, 8, seed=heads) for heads in (4, 2, 2))
    for layout in VARIANTS:
        out = peer_attention(layout, "math")(q, k, v, causal=True, group=None)
        torch.testing.assert_close(out, _reference(q, k, v, 0.5, True)[0])
    left = {name for name in sys.modules if name.partition(".")[0] in {"ring_flash_attn", "flash_attn"}}
    assert left == {"ring_flash_attn.other"}
    assert sys.modules["ring_flash_attn.other"] is other
    assert describe_peer() == {"version": "a checkout", "kernels": "torch's, as our layouts"}
    assert peer_attention("ring", "math") is peer_attention("ring", "math")
    assert peer_attention("ring", "math") is not peer_attention("ring", "flash")


def test_a_package_that_fails_leaves_no_module_behind(package: Path) -> None:
    (package / "helpers.py").write_text("raise RuntimeError('broken')\n")
    with pytest.raises(RuntimeError, match="broken"):
        peer_attention("ring", "math")
    assert not [name for name in sys.modules if name.partition(".")[0] in {"ring_flash_attn", "flash_attn"}]


def test_an_own_flash_attn_is_used_where_it_is_installed(package: Path) -> None:
    kernels = package.parent / "flash_attn"
    kernels.mkdir()
    (kernels / "__init__.py").write_text("")
    (kernels / "flash_attn_interface.py").write_text(
        "def _flash_attn_forward(*_): return 'its own', 0, 0, 0\n_flash_attn_backward = None\n"
    )
    importlib.invalidate_caches()
    assert str(peer_attention("ring", "flash")(None, None, None)) == "its own"
    with pytest.raises(PeerMissingError, match="runs on its kernels, not on cudnn's"):
        peer_attention("ring", "cudnn")
    assert describe_peer()["kernels"] == "flash_attn"


def test_without_the_package_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PeerMissingError, match="ring_flash_attn is not installed"):
        peer_attention("ring", "flash")
    assert describe_peer() == {"reason": "ring_flash_attn is not installed"}


@pytest.mark.skipif(importlib.util.find_spec("ring_flash_attn") is None, reason="ring-flash-attn is not installed")
def test_its_variants_are_right_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--device", "cpu", "--dtype", "bfloat16", "--out", str(out), "--seq-lengths", "64", "--rounds", "1"]
    command = [*launcher, "-m", "benchmarks.context_parallel", *options]
    child = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT)
    assert child.returncode == 0, child.stderr
    found = json.loads(out.read_text())
    for name in PEERS:
        assert max(found["checks"]["flash"][name]["errors"].values()) < 1e-2
        assert found["cells"][0]["timed"][name]["speed_over_ring"] > 0
