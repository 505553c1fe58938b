from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bexp.explorer.cost.components import BlockRecompute, ComponentKind
from bexp.explorer.cost.composition import Composition
from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import ON_DEVICE, Recompute
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.memory_meters import byte_meter, measure_memory
from bexp.workers.targets.reference.decoder import DecoderModel
from bexp.workers.targets.reference.factory import build_block, example_inputs, random_tokens
from bexp.workers.targets.reference.target import BlockPasses
from tests.bexp.kernels.references import relative_error
from tests.workers.targets.reference import references
from tests.workers.targets.reference.models import CPU, shake, small_model, small_moe

BATCH = 4
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "gpt2": {
        "position": "learned",
        "max_position_embeddings": 40,
        "norm": "layernorm",
        "gated_mlp": False,
        "activation": "gelu",
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
    },
    "neox": {"parallel_residual": True, "rotary_fraction": 0.25, "norm": "layernorm", "lm_head_bias": True},
    "moe": {"moe": small_moe(), "ffn_hidden_size": 0, "qk_norm": "full"},
    "mixed": {
        "moe": small_moe(first_k_dense=1, shared_expert_ffn_hidden_size=24, shared_expert_gate=True),
        "num_query_groups": 2,
        "qk_norm": "head",
        "mlp_bias": True,
    },
    "every other": {"num_layers": 5, "moe": small_moe(moe_layer_frequency=2), "num_query_groups": 1},
}


def decoder(model: ModelSpec, mode: str = "train", **choice: Any) -> DecoderModel:
    request = ExplorationRequest.model_validate(
        {"model": model, "mode": mode, "training": {"loss": {"kind": "chunked", "chunk_tokens": 128}}}
    )
    fields = {
        "micro_batch_size": BATCH,
        "attention_backend": "flash",
        "expert_backend": "loop" if model.moe else None,
        "num_query_groups": model.query_groups,
    }
    generator = torch.Generator().manual_seed(0)
    return DecoderModel(model, Candidate.model_validate({**fields, **choice}), request, CPU, generator=generator)


def batch(model: ModelSpec) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, model.seq_length)
    return random_tokens(model, shape, CPU, generator), random_tokens(model, shape, CPU, generator)


def gradients(model: DecoderModel, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    loss = model(tokens, targets)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS.keys())
def test_parameters_are_those_that_are_counted(fields: dict[str, Any]) -> None:
    model = small_model(**fields)
    assert sum(p.numel() for p in decoder(model).parameters()) == count_parameters(model)


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS.keys())
def test_loss_against_the_reference(fields: dict[str, Any]) -> None:
    model = small_model(**fields)
    module = decoder(model)
    shake(module, torch.Generator().manual_seed(7))
    tokens, targets = batch(model)
    p = {name: parameter.detach().double() for name, parameter in module.named_parameters()}
    x = p["embedding.w_tokens"][tokens]
    if model.position == "learned":
        x = x + p["embedding.w_positions"][: model.seq_length]
    for i, kind in enumerate(model.layer_kinds):
        attention, ffn = under(p, f"layers.{i}.attention."), under(p, f"layers.{i}.ffn.")
        after = references.attention_block(model, attention, x)
        seen = x if model.parallel_residual else after
        if kind == "moe":
            routes = module.get_submodule(f"layers.{i}.ffn").routes
            assert isinstance(routes, Tensor)
            out = references.moe_ffn(model, ffn, seen, routes)
        else:
            out = references.dense_ffn(model, ffn, seen)
        x = after + out - seen
    projection = p["embedding.w_tokens"] if model.tie_embeddings else p["head.w_vocab"]
    h = references.norm(model, under(p, "head."), x).flatten(0, 1)
    logits = h @ projection.T + p.get("head.b_vocab", torch.zeros(1, dtype=h.dtype))
    wanted = (torch.logsumexp(logits, -1) - logits.gather(1, targets.view(-1, 1)).squeeze(1)).mean()
    assert module(tokens, targets).item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("recompute", [*ON_DEVICE, Recompute("layers_1"), Recompute("groups_2")])
@pytest.mark.parametrize(("name", "tile"), [("neox", 4), ("mixed", None), ("mixed", 2)])
def test_no_policy_changes_a_gradient(name: str, recompute: Recompute, tile: int | None) -> None:
    model = small_model(**MODELS[name])
    tokens, targets = batch(model)
    plain = gradients(decoder(model), tokens, targets)
    other = gradients(decoder(model, recompute=recompute, bta_tile=tile), tokens, targets)
    assert other.keys() == plain.keys()
    for key, value in plain.items():
        assert relative_error(other[key], value) <= 1e-5, key


@pytest.mark.parametrize("name", ["gpt2", "mixed"])
def test_eval_has_no_graph_and_no_trainable_parameter(name: str) -> None:
    model = small_model(**MODELS[name])
    module = decoder(model, mode="eval", recompute="full", bta_tile=2)
    loss = module(*batch(model))
    assert not loss.requires_grad
    assert not any(p.requires_grad for p in module.parameters())
    torch.testing.assert_close(loss, decoder(model)(*batch(model)).detach())


def test_layers_share_their_rotary_tables() -> None:
    tables = {b.data_ptr() for name, b in decoder(small_model()).named_buffers(remove_duplicate=False)}
    assert len(tables) == 2  # cosines and sines


def test_every_expert_layer_has_the_same_routes() -> None:
    module = decoder(small_model(**MODELS["moe"]))
    routes = [layer.get_submodule("ffn").routes for layer in module.layers]
    assert all(r is routes[0] for r in routes)
    assert isinstance(routes[0], Tensor)
    assert routes[0].shape == (BATCH * 12, 2)


def under(parameters: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}


SHAPE: dict[str, Any] = {"num_layers": 7, "seq_length": 64, "vocab_size": 64}


class _Products(TorchDispatchMode):
    """Counts matrix products that run, the backward pass included."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def composed_peak(candidate: Candidate, request: ExplorationRequest) -> float:
    table = Composition([candidate], request.shapes, request)
    sizes = np.zeros((3, len(table.components)))
    for i, component in enumerate(table.components):
        if component.kind is ComponentKind.OPTIMIZER:
            continue
        block = build_block(request.shapes, component, request, CPU)
        inputs = example_inputs(request.shapes, component, CPU)
        found = measure_memory(BlockPasses(block, inputs, training=True, gradient_dtype=torch.float32), CPU)
        sizes[:, i] = found.saved, found.forward_peak, found.backward_peak
    saved_C, transient_C = table.activation_bytes(*sizes)
    return float(saved_C[0] + transient_C[0])


def whole_peak(candidate: Candidate, request: ExplorationRequest) -> int:
    model = request.shapes
    decoder = DecoderModel(model, candidate, request, CPU)
    tokens, targets = (random_tokens(model, (BATCH, model.seq_length), CPU, None) for _ in range(2))
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    existing = [*decoder.parameters(), *(p.grad for p in decoder.parameters()), *decoder.buffers(), tokens, targets]
    with byte_meter(CPU, [tensor for tensor in existing if tensor is not None]) as meter:
        meter.reset_peak()
        base = meter.level()
        decoder(tokens, targets).backward()
        return meter.peak() - base


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ("none", "layers_3", "full", "groups_3", "groups_7")),
        ({"moe": small_moe(first_k_dense=2)}, ("none", "layers_3", "groups_3", "groups_7")),
    ],
    ids=["dense", "experts"],
)
def test_the_composed_peak_is_that_of_the_whole_model(fields: dict[str, Any], names: tuple[str, ...]) -> None:
    request = ExplorationRequest(model=small_model(**SHAPE, **fields), batch_size=8)
    peaks = {}
    for name in names:
        candidate = Candidate(
            micro_batch_size=BATCH,
            recompute=Recompute(name),
            attention_backend="flash",
            expert_backend="loop" if fields else None,
            num_query_groups=request.shapes.query_groups,
        )
        peaks[name] = (composed_peak(candidate, request), whole_peak(candidate, request))
    assert {name: composed for name, (composed, _) in peaks.items()} == {
        name: whole for name, (_, whole) in peaks.items()
    }
    assert peaks.get("full", (0, 0))[1] < peaks["groups_3"][1] < peaks["groups_7"][1]
    assert peaks["layers_3"][1] < peaks["none"][1]


def test_a_block_of_a_group_runs_again_to_its_end() -> None:
    """A layer by itself leaves out its last product, which a later layer of the same group needs."""
    model = small_model()
    request = ExplorationRequest(model=model)
    calls = {}
    for recompute in (BlockRecompute.FULL, BlockRecompute.TO_THE_END):
        candidate = Candidate(
            micro_batch_size=BATCH,
            recompute=Recompute.FULL if recompute is BlockRecompute.FULL else Recompute("groups_2"),
            attention_backend="flash",
            num_query_groups=model.query_groups,
        )
        (component,) = (
            c for c in Composition([candidate], model, request).components if c.kind is ComponentKind.DENSE_FFN
        )
        assert component.recompute is recompute
        block = build_block(model, component, request, CPU)
        x = example_inputs(model, component, CPU, training=True)[0]
        with _Products() as products:  # type: ignore[no-untyped-call]  # untyped in torch
            block(x).sum().backward()
        calls[recompute] = products.count
    assert calls[BlockRecompute.TO_THE_END] == calls[BlockRecompute.FULL] + 1
