from __future__ import annotations

import copy
import functools
import io
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from bexp.kernels import triton_support
from bexp.kernels.experts import registry
from bexp.transformers import experts
from bexp.transformers.layers import decoder_layers
from bexp.transformers.recompute import OnHost
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings, SettingsError
from tests.bexp.kernels.references import assert_same_values
from tests.bexp.transformers import models
from tests.bexp.transformers.ranks import NUM_RANKS, WRAPPERS
from tests.forked_ranks import run_ranks

DENSE = [
    Settings(attention="eager"),
    Settings(attention="sdpa:math"),
    Settings(attention="sdpa:flash"),
    Settings(recompute="full"),
    Settings(recompute="layers_1"),
    Settings(recompute="partial_50"),
    Settings(recompute="groups_2"),
    Settings(recompute="activations"),
    Settings(recompute="projections"),
    Settings(recompute="offload"),
    Settings(bta_tile=1),
    Settings(bta_tile=3),
    Settings(bta_tile=2, recompute="full"),
    Settings(loss="chunked"),
    Settings(recompute="full", bta_tile=2, loss="chunked"),
    Settings(recompute="activations", bta_tile=2, loss="chunked", attention="eager"),
]
SPARSE = [
    Settings(experts="eager"),
    Settings(experts="batched_mm"),
    Settings(experts="grouped_mm"),
    Settings(experts="bexp_fused"),
    Settings(experts="bexp_hopper_grouped"),
    Settings(experts="bexp_block_sparse"),
    Settings(experts="bexp_fused", recompute="experts"),
    Settings(experts="bexp_fused", recompute="activations"),
    Settings(attention="sdpa:math", experts="bexp_fused", recompute="layers_1", bta_tile=2, loss="chunked"),
]


def name(settings: Settings) -> str:
    default = asdict(Settings())
    return "-".join(f"{k}={v}" for k, v in asdict(settings).items() if v != default[k])


@pytest.mark.parametrize("model_type", ["llama", "olmoe", "qwen3_moe", "gpt2", "gemma2"])
def test_every_setting_keeps_the_loss_and_every_gradient(model_type: str) -> None:
    model = models.tiny(model_type)
    inputs = [models.batch(padded=True), models.batch(size=5)]
    wanted = [models.step(model, batch) for batch in inputs]
    before = models.snapshot(model)
    names = [n for n, _ in model.named_parameters()]
    for settings in DENSE + (SPARSE if model_type in models.MIXTURES else []):
        if model_type == "gemma2" and (settings.attention or "").startswith("sdpa"):
            continue  # the library itself refuses sdpa there, because of soft-capping
        applied = set_up(model, settings, chunk=7)
        assert [n for n, _ in model.named_parameters()] == names
        for batch, expected in zip(inputs, wanted, strict=True):
            models.assert_same(models.step(model, batch), expected)
        if model_type == "olmoe":
            torch.save(model, stored := io.BytesIO())
            stored.seek(0)
            models.assert_same(models.step(torch.load(stored, weights_only=False), inputs[0]), wanted[0])
        applied.undo()
        assert models.snapshot(model) == before, name(settings)
    models.assert_same(models.step(model, inputs[0]), wanted[0])


needs_torch_loss = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")


@needs_torch_loss
@pytest.mark.parametrize("model_type", ["llama", "olmoe", "gpt2"])
def test_torch_s_own_loss_in_chunks_gives_the_same_gradients(model_type: str) -> None:
    model = models.tiny(model_type)
    inputs = [models.batch(), {**models.batch(), "num_items_in_batch": torch.tensor(11)}]
    wanted = [models.step(model, batch) for batch in inputs]
    applied = set_up(model, Settings(loss="torch"), chunk=5)
    for batch, expected in zip(inputs, wanted, strict=True):
        models.assert_same(models.step(model, batch), expected)
    applied.undo()
    models.assert_same(models.step(model, inputs[0]), wanted[0])


@needs_torch_loss
def test_torch_s_own_loss_refuses_logits_that_a_model_changes() -> None:
    model = models.tiny("gemma2")
    set_up(model, Settings(loss="torch"))
    with pytest.raises(SettingsError, match="name the loss chunked"):
        models.step(model, models.batch())


def test_torch_s_own_loss_says_which_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(SettingsError, match=r"needs torch 2\.13, and this is \d"):
        set_up(models.tiny("llama"), Settings(loss="torch"))


def test_the_logits_are_never_there_as_a_whole_unless_asked_for() -> None:
    model = models.tiny("gemma2")
    batch = models.batch()
    plain = model(**batch)
    set_up(model, Settings(loss="chunked"), chunk=5)
    out = model(**batch)
    assert out.logits._computed is None
    assert out.logits.shape == plain.logits.shape
    assert out.logits._computed is None
    torch.testing.assert_close(out.logits + 0, plain.logits)
    assert out.logits._computed is not None


def test_a_loss_of_the_callers_own_works_on_lazy_logits() -> None:
    model = models.tiny("llama")
    tokens = models.batch()["input_ids"]

    def own_loss() -> torch.Tensor:
        logits = model(input_ids=tokens).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    wanted = torch.autograd.grad(own_loss(), list(model.parameters()))
    set_up(model, Settings(loss="chunked"))
    for actual, expected in zip(torch.autograd.grad(own_loss(), list(model.parameters())), wanted, strict=True):
        torch.testing.assert_close(actual, expected)


def test_the_number_of_items_divides_the_chunked_loss() -> None:
    model = models.tiny("llama")
    batch = models.batch()
    wanted = models.step(model, batch, num_items_in_batch=torch.tensor(77))
    set_up(model, Settings(loss="chunked"), chunk=5)
    models.assert_same(models.step(model, batch, num_items_in_batch=torch.tensor(77)), wanted)
    models.assert_same(models.step(model, batch, num_items_in_batch=77), wanted)


def test_evaluation_returns_plain_logits() -> None:
    model = models.tiny("llama").eval()
    batch = models.batch()
    wanted = model(**batch)
    set_up(model, Settings(loss="chunked", bta_tile=2, recompute="full"))
    with torch.no_grad():
        out = model(**batch)
    assert type(out.logits) is torch.Tensor
    torch.testing.assert_close(out.logits, wanted.logits)
    torch.testing.assert_close(out.loss, wanted.loss)


def test_generation_works_on_a_model_that_is_set_up() -> None:
    model = models.tiny("llama").eval()
    tokens = models.batch()["input_ids"]
    wanted = model.generate(tokens, max_new_tokens=4, do_sample=False)
    set_up(model, Settings(loss="chunked", bta_tile=2, recompute="full", attention="sdpa:math"))
    assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), wanted)


def test_one_layer_alone_is_set_up_like_the_model() -> None:
    model = models.tiny("olmoe")
    layer = decoder_layers(model)[1]
    captured: dict[str, Any] = {}

    def capture(_module: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        captured.update(args=args, kwargs=kwargs)

    def run() -> list[torch.Tensor]:
        # What a layer is handed depends on the attention that is set: masks differ.
        handle = layer.register_forward_pre_hook(capture, with_kwargs=True)
        model(**models.batch(), use_cache=False)
        handle.remove()
        leaf = x.clone().requires_grad_()
        out = layer(leaf, *captured["args"][1:], **captured["kwargs"])
        out = out[0] if isinstance(out, tuple) else out
        return [out, *torch.autograd.grad(out.square().sum(), [leaf, *layer.parameters()])]

    x = torch.randn(4, 12, 32)
    wanted = run()
    for settings in [*DENSE, *SPARSE]:
        applied = set_up(layer, settings)
        for actual, expected in zip(run(), wanted, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        applied.undo()


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("gpt_oss", Settings(experts="bexp_fused"), "interleaved"),
        ("llama", Settings(experts="grouped_mm"), "has no experts"),
        ("llama", Settings(attention="no_such"), "no_such"),
        ("olmoe", Settings(experts="no_such"), "no_such"),
        ("llama", Settings(recompute="layers_9"), "more layers than the 2"),
        ("gemma2", Settings(attention="sdpa:flash"), "sdpa"),
        ("llama", Settings(recompute="experts"), "no experts"),
    ],
)
def test_what_a_model_cannot_have_is_refused_with_the_reason(model_type: str, settings: Settings, reason: str) -> None:
    model = models.tiny(model_type)
    before = models.snapshot(model)
    with pytest.raises(SettingsError, match=reason):
        set_up(model, settings)
    assert models.snapshot(model) == before


@pytest.mark.parametrize(
    "values",
    [
        {"attention": "eager:flash"},
        {"recompute": "qkv"},
        {"recompute": "offload", "compile": True},
        {"recompute": "offload", "graph": True},
        {"bta_tile": 0},
        {"loss": "other"},
        {"allocator": "other"},
        {"experts": "../x"},
    ],
)
def test_what_no_model_can_have_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        Settings(**values)


def test_checkpoints_and_optimizer_states_are_the_same(tmp_path: Path) -> None:
    """A run that is set up can save, and a plain one can go on from there."""
    settings = Settings(experts="bexp_fused", recompute="full", bta_tile=2, loss="chunked", attention="sdpa:math")
    plain = models.tiny("olmoe")
    tuned = copy.deepcopy(plain)
    set_up(tuned, settings, chunk=5)
    batch = models.batch()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, tuned)]

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    for _ in range(3):
        losses = [train(m, o) for m, o in zip((plain, tuned), optimizers, strict=True)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    tuned.save_pretrained(tmp_path / "model")
    torch.save(optimizers[1].state_dict(), tmp_path / "optimizer.pt")
    loaded = type(plain).from_pretrained(tmp_path / "model").train()
    assert set(loaded.state_dict()) == set(plain.state_dict())
    resumed = torch.optim.AdamW(loaded.parameters(), lr=1e-3)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    after = [train(m, o) for m, o in zip((plain, loaded), (optimizers[0], resumed), strict=True)]
    assert after[0] == pytest.approx(after[1], rel=1e-4)


@pytest.mark.parametrize("reason", [None, "Triton is not installed"])
def test_a_compiled_layer_knows_whether_kernels_run_here(reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "triton_reason", functools.cache(lambda device: reason))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def is_refused(weight: torch.Tensor) -> torch.Tensor:
        found = experts._cuda_reason("bexp_fused", str(weight.device), weight.shape[1], weight.shape[2])
        return weight.new_ones(()) * (found is not None)

    torch.compiler.reset()
    compiled = torch.compile(is_refused, backend="eager", fullgraph=True)
    assert bool(compiled(torch.zeros(2, 8, 16))) is (reason is not None)


def test_compiled_layers_are_not_split_by_the_buckets_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda layer: None)
    with torch._dynamo.config.patch(optimize_ddp=True):  # compiled reference layers switch it off for good
        applied = set_up(models.tiny("llama"), Settings(compile=True))
        assert not torch._dynamo.config.optimize_ddp
        applied.undo()
        assert torch._dynamo.config.optimize_ddp


@pytest.mark.parametrize("traceable", [True, False])
def test_a_compiled_layer_traces_our_experts_where_it_can(traceable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + torch.compiler.is_compiling()

    dtypes = frozenset({torch.bfloat16} if traceable else ())
    backend = SimpleNamespace(forward=forward, traceable_dtypes=dtypes)
    monkeypatch.setattr(registry, "expert_backend", lambda name: backend)
    monkeypatch.setattr(experts, "_LEFT_EAGER", {})
    monkeypatch.setattr(experts, "_device_reason", lambda name, weight: None)
    weight: Any = SimpleNamespace(is_cuda=True)
    experts.leave_eager("bexp_hopper_grouped")

    def layer(x: torch.Tensor) -> torch.Tensor:
        ffn: Any = experts._implementation("bexp_hopper_grouped", "cuda", weight, as_operator=False)
        found: torch.Tensor = ffn(2 * x)
        return found

    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager")
    assert compiled(torch.zeros(1)).item() == traceable
    assert layer(torch.zeros(1)).item() == 0


@pytest.mark.slow(together="forked")
def test_gradients_under_ddp_and_fully_shard_are_those_of_the_plain_model(tmp_path: Path) -> None:
    run_ranks("tests.bexp.transformers.ranks", tmp_path)
    for rank in range(NUM_RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.keys() == set(WRAPPERS)
        assert max(found.values()) <= 5e-5, found


def test_weights_stay_where_they_are_and_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
    x = torch.randn(10, 24, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    taken: list[Tensor] = []
    run = OnHost(layer)
    pack = run._host.pack_hook

    def noted(tensor: Tensor) -> Any:
        taken.append(tensor)
        return pack(tensor)

    run._host.pack_hook = noted
    out = run(x)
    weights = {parameter.data_ptr() for parameter in layer.parameters()}
    assert [tuple(tensor.shape) for tensor in taken] == [(10, 24), (10, 24), (10, 24)], (
        "input, and the activation twice"
    )
    assert weights.isdisjoint(tensor.data_ptr() for tensor in taken)
    assert run.host_bytes == 3 * 1024, "960 bytes each, rounded up to a power of two"
    found = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    assert_same_values(found, expected)
    with save_on_cpu(), torch.no_grad():
        run(x)
    assert run.host_bytes == 3 * 1024, "without gradients nothing is kept"
