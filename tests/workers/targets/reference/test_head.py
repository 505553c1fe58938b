from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.training import LossSpec
from bexp.kernels.causal_loss import causal_cross_entropy
from bexp.kernels.loss import chunked_cross_entropy, full_cross_entropy
from bexp.workers.targets.reference.head import Head
from tests.bexp.kernels.references import relative_error
from tests.workers.targets.reference.models import CPU, shake, small_model

FULL, CHUNKED = LossSpec(kind="full"), LossSpec(kind="chunked", chunk_tokens=128)
BATCH = 20  # 240 tokens: a whole chunk and a part of one


def run(model: ModelSpec, loss: LossSpec, scale: float = 1.0, w_tied: nn.Parameter | None = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    head = Head(model, loss=loss, device=CPU, training=True, w_tied=w_tied)
    shake(head, generator)
    x = torch.randn(BATCH, 12, 48, generator=generator).to(head.w_vocab.dtype).requires_grad_()
    targets = torch.randint(model.vocab_size, (BATCH, 12), generator=generator)
    out = head(x, targets)
    (out * scale).backward()
    return {"out": out, "x": x.grad, **{name: p.grad for name, p in head.named_parameters()}}


@pytest.mark.parametrize(
    ("fields", "scale", "tolerance"),
    [
        ({}, 1.0, 1e-5),
        ({"lm_head_bias": True, "norm": "layernorm"}, 0.125, 1e-5),
        ({"lm_head_bias": True, "dtype": "bfloat16"}, 1.0, 2e-2),
    ],
    ids=str,
)
def test_chunks_equal_the_full_loss(fields: dict[str, Any], scale: float, tolerance: float) -> None:
    """The weight's gradient is rounded after each chunk, as gradients accumulated over micro-batches are."""
    model = small_model(**fields)
    full, chunked = run(model, FULL, scale), run(model, CHUNKED, scale)
    for name, value in full.items():
        assert relative_error(chunked[name], value) <= tolerance, name
        assert chunked[name].dtype is value.dtype
    assert chunked["out"].dtype is torch.float32


@pytest.mark.parametrize("loss", [FULL, CHUNKED], ids=lambda loss: loss.kind)
def test_a_tied_projection_gets_the_gradient_of_both_uses(loss: LossSpec) -> None:
    model = small_model(tie_embeddings=True)
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(model.vocab_size, 48, generator=generator) / 7)
    head = Head(model, loss=loss, device=CPU, training=True, w_tied=weight)
    tokens, targets = torch.randint(model.vocab_size, (2, BATCH, 12), generator=generator)
    head(nn.functional.embedding(tokens, weight), targets).backward()

    w64 = weight.detach().double().requires_grad_()
    x = w64[tokens.flatten()]
    h = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    logits = h @ w64.T
    (torch.logsumexp(logits, -1) - logits.gather(1, targets.view(-1, 1)).squeeze(1)).mean().backward()
    assert head.w_vocab is weight
    assert relative_error(weight.grad, w64.grad) <= 1e-5


class _LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operators have returned, as long as they live, and the most of them at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.most = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self._now += storage.nbytes()
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return out

    def _freed(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._now -= num_bytes


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.bfloat16, 6), (torch.float32, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_chunk_holds_its_logits_and_one_copy_in_float32(dtype: torch.dtype, bytes_each: int, causal: bool) -> None:
    h, w = torch.randn(256, 8, dtype=dtype, requires_grad=True), torch.randn(4000, 8, dtype=dtype)
    targets = torch.zeros(256, dtype=torch.int64)
    with _LiveBytes() as live:
        if causal:
            causal_cross_entropy(h, w, None, targets, chunk=128)
        else:
            chunked_cross_entropy(h, w, None, targets, 128)
    assert bytes_each <= live.most / (128 * 4000) <= bytes_each + 0.5


def test_without_gradients_there_is_only_the_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(300, 8, generator=generator).requires_grad_()
    w = torch.randn(50, 8, generator=generator).requires_grad_()
    targets = torch.randint(50, (300,), generator=generator)
    with torch.no_grad():
        loss = chunked_cross_entropy(h, w, None, targets, 128)
        torch.testing.assert_close(loss, full_cross_entropy(h, w, None, targets))
    assert not loss.requires_grad


def test_a_second_backward_is_refused() -> None:
    w = torch.randn(5, 8, requires_grad=True)
    loss = chunked_cross_entropy(torch.randn(3, 8), w, None, torch.tensor([0, 1, 2]), 128)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()


@pytest.mark.parametrize("chunk", [1024, 4096])
def test_a_gradient_in_float16_does_not_overflow_where_its_mean_fits(chunk: int) -> None:
    num_tokens, targets = 4096, torch.zeros(4096, dtype=torch.int64)
    h = torch.full((num_tokens, 4), 40.0, dtype=torch.float16)  # the sum of the gradients is 109,227
    losses: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda w: chunked_cross_entropy(h, w, None, targets, chunk),
        lambda w: causal_cross_entropy(h, w, None, targets, chunk=chunk) / num_tokens,
    )
    for loss in losses:
        weight = torch.zeros(3, 4, dtype=torch.float16, requires_grad=True)
        torch.autograd.backward(loss(weight))
        assert weight.grad is not None
        torch.testing.assert_close(
            weight.grad[:, 0].double(), 40 * torch.tensor([-2 / 3, 1 / 3, 1 / 3]).double(), rtol=1e-3, atol=0
        )
