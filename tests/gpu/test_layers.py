"""Blocks, optimizer and whole models on a CUDA device in bfloat16."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from bexp.explorer.cost.components import BlockRecompute
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.model import DType, ModelSpec
from bexp.explorer.model.training import OptimizerSpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.kernels.attention import attention_backend
from bexp.workers.instruments.kernel_shapes import attention_shape
from bexp.workers.targets.reference.attention_block import AttentionBlock
from bexp.workers.targets.reference.decoder import DecoderModel
from bexp.workers.targets.reference.factory import random_tokens
from bexp.workers.targets.reference.head import Head
from bexp.workers.training.optimizer import TrainingOptimizer, build_optimizer
from tests.bexp.kernels.references import relative_error
from tests.gpu.needs import one_gpu
from tests.workers.targets.reference import references
from tests.workers.targets.reference.models import outcome, shake, small_model, small_moe

pytestmark = one_gpu()

CUDA = torch.device("cuda")
CPU = torch.device("cpu")
TOLERANCE = 2e-2  # values are rounded to bfloat16 after each of a block's operations, forward and backward
BACKENDS = ("flash", "cudnn", "efficient", "math")


def gpu_model(**fields: Any) -> ModelSpec:
    base = {"hidden_size": 256, "ffn_hidden_size": 512, "head_dim": 64, "seq_length": 128, "dtype": "bfloat16"}
    return small_model(**{**base, **fields})


def block(model: ModelSpec, backend: str, **fields: Any) -> AttentionBlock:
    reason = attention_backend(backend).unsupported_reason(attention_shape(model), CUDA)
    if reason is not None:
        pytest.skip(reason)
    settings: dict[str, Any] = {"bta_tile": None, "recompute": BlockRecompute.NONE, "training": True, **fields}
    return AttentionBlock(model, backend=backend, device=CUDA, **settings)


def hidden(model: ModelSpec, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, model.seq_length, model.hidden_size, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fields", [{}, {"num_query_groups": 2, "qk_norm": "head", "rotary_fraction": 0.5}], ids=str)
def test_attention_block(backend: str, fields: dict[str, Any]) -> None:
    model = gpu_model(**fields)
    module = block(model, backend)
    shake(module, torch.Generator(CUDA).manual_seed(0))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.1)
    x = hidden(model, 2)
    actual = outcome(module, module, x.to(CUDA))
    p64 = {name: p.detach().double().cpu().requires_grad_() for name, p in module.named_parameters()}
    x64 = x.double().requires_grad_()
    out = references.attention_block(model, p64, x64)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.bfloat16).view_as(out).double()
    (out * weight).sum().backward()
    expected = {"out": out, "x": x64.grad, **{name: p.grad for name, p in p64.items()}}
    errors = {name: relative_error(actual[name], wanted) for name, wanted in expected.items()}
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", [1, 2, 4])
def test_tiling_is_exact(backend: str, tile: int) -> None:
    model = gpu_model()
    whole, parts = block(model, backend), block(model, backend, bta_tile=tile)
    parts.load_state_dict(whole.state_dict())
    x = hidden(model, 4).to(CUDA)
    expected, actual = outcome(whole, whole, x), outcome(parts, parts, x)
    for name, value in expected.items():
        assert relative_error(actual[name], value) <= 1e-2, name


@pytest.mark.parametrize("recompute", list(BlockRecompute))
def test_a_tile_bounds_the_peak(recompute: BlockRecompute) -> None:
    """What a forward and backward adds beside the hidden states shrinks with the tile, as one tile's share does."""
    model = gpu_model(seq_length=512, num_attention_heads=8)
    x = torch.randn(16, 512, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)

    def peak(tile: int | None) -> int:
        module = block(model, "math", bta_tile=tile, recompute=recompute)
        module(x[:8]).sum().backward()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        module(x).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    whole, half, one = peak(None), peak(8), peak(1)
    states = 8 * x.nbytes
    assert half <= whole / 2 + states
    assert one <= whole / 16 + states
    assert one < half < whole


@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_head(loss: str) -> None:
    model = gpu_model(lm_head_bias=True)
    results: list[tuple[Head, dict[str, torch.Tensor | None]]] = []
    for device, dtype in ((CUDA, DType.BFLOAT16), (CPU, DType.FLOAT32)):
        spec = ExplorationRequest.model_validate(
            {"model": model, "training": {"loss": {"kind": loss, "chunk_tokens": 200}}}
        ).training.loss
        head = Head(model.model_copy(update={"dtype": dtype}), loss=spec, device=device, training=True)
        if results:
            head.load_state_dict({name: p.detach().cpu().float() for name, p in results[0][0].named_parameters()})
        x = hidden(model, 4).to(device, next(head.parameters()).dtype).requires_grad_()
        targets = torch.randint(101, (4, 128), generator=torch.Generator().manual_seed(0)).to(device)
        out = head(x, targets)
        out.backward()
        results.append((head, {"loss": out, "x": x.grad, **{name: p.grad for name, p in head.named_parameters()}}))
    for name, wanted in results[1][1].items():
        assert relative_error(results[0][1][name], wanted) <= TOLERANCE, name


POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "selective"},
    {"recompute": "full", "bta_tile": 2},
    {"recompute": "partial_50"},
    {"recompute": "activations", "bta_tile": 2},
    {"recompute": "qkv"},
    {"recompute": "experts"},
    {"recompute": "projections"},
)


def check_steps(execution: str, choice: dict[str, Any]) -> None:
    model = gpu_model(moe=small_moe(first_k_dense=1, shared_expert_ffn_hidden_size=64), num_query_groups=2)
    request = ExplorationRequest.model_validate({"model": model, "execution": execution})
    fields = {"micro_batch_size": 4, "attention_backend": "flash", "num_query_groups": 2}
    candidate = Candidate.model_validate({**fields, **choice})
    module = DecoderModel(model, candidate, request, CUDA, generator=torch.Generator(CUDA).manual_seed(0))
    optimizer = TrainingOptimizer(module.parameters(), OptimizerSpec(), model.dtype, bucket_bytes=1 << 16)
    tokens = random_tokens(model, (4, 128), CUDA)
    losses = []
    for _ in range(6):
        loss = module(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "bmm"])
@pytest.mark.parametrize("choice", POLICIES, ids=str)
def test_a_whole_model_steps(backend: str, choice: dict[str, Any]) -> None:
    check_steps("eager", {**choice, "expert_backend": backend})


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own deprecated parts
@pytest.mark.parametrize("choice", POLICIES[:3], ids=str)
def test_a_compiled_model_steps(choice: dict[str, Any]) -> None:
    check_steps("compile", {**choice, "expert_backend": "grouped_mm"})


def test_gradients_on_cuda_equal_those_on_cpu() -> None:
    model = gpu_model(moe=small_moe(first_k_dense=1), num_query_groups=2)
    fields = {"micro_batch_size": 2, "attention_backend": "flash", "expert_backend": "loop", "num_query_groups": 2}
    candidate = Candidate.model_validate(fields)
    single = model.model_copy(update={"dtype": DType.FLOAT32})
    reference = DecoderModel(single, candidate, ExplorationRequest(model=single), CPU)
    module = DecoderModel(model, candidate, ExplorationRequest(model=model), CUDA)
    module.load_state_dict(reference.state_dict())
    reference.load_state_dict({name: p.cpu().float() for name, p in module.state_dict().items()})
    tokens = random_tokens(model, (2, 128), CPU, torch.Generator().manual_seed(0))
    module(tokens.to(CUDA), tokens.to(CUDA)).backward()
    reference(tokens, tokens).backward()
    wanted = dict(reference.named_parameters())
    errors = {name: relative_error(p.grad, wanted[name].grad) for name, p in module.named_parameters()}
    assert max(errors.values()) <= 5e-2, errors  # three layers deep


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("grad_dtype", [None, "float32"])
def test_optimizer_on_cuda_equals_that_on_cpu(name: str, grad_dtype: str | None) -> None:
    spec = OptimizerSpec.model_validate({"name": name, "grad_dtype": grad_dtype})
    start = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    results = []
    for device in (CUDA, CPU):
        parameter = torch.nn.Parameter(start.to(device))
        optimizer = TrainingOptimizer([parameter], spec, DType.BFLOAT16, bucket_bytes=4096)
        for _ in range(4):
            (parameter * gradient.to(device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(parameter.detach().cpu())
    assert relative_error(results[0], results[1]) <= 1e-3


def test_muon_on_cuda_equals_that_on_cpu() -> None:
    """The change is compared, which is rounded to bfloat16 in five iterations; small weights resolve it."""
    spec, generator = OptimizerSpec(name="muon"), torch.Generator().manual_seed(0)
    shapes = ((192, 64), (64, 192), (64,), (4, 64, 32))
    start = [(2**-6 * torch.randn(shape, generator=generator)).to(torch.bfloat16) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    results = []
    for device in (CUDA, CPU):
        parameters = [torch.nn.Parameter(one.to(device, copy=True)) for one in start]
        optimizer = build_optimizer(parameters, spec, DType.BFLOAT16)
        for _ in range(40):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.to(device)
            optimizer.step()
        results.append([parameter.detach().cpu() for parameter in parameters])
    for found, wanted, before in zip(*results, start, strict=True):
        assert not torch.equal(wanted, before)
        assert relative_error(found.float() - before.float(), wanted.float() - before.float()) <= 0.1
