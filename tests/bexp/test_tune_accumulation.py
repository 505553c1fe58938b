"""`bexp.check_accumulation` in a loop of one's own: what agrees, what does not, and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM, PretrainedConfig

import bexp
from bexp.tune.agreement import CannotCheckError, Parts, check
from bexp.tune.agreement_text import AccumulationCheck, Cause
from bexp.tune.gradients import SAMPLED, Gradient, difference, kind_of
from bexp.tune.lengths import label_tokens, most_unequal
from bexp.tune.switched_off import (
    LOSS_SCALE,
    nothing_random,
    rounded_otherwise,
    without_batch_statistics,
    without_router_loss,
)
from tests.bexp.kernels.references import assert_same_values, relative_error

Batch = list[torch.Tensor]
LENGTHS = (5, 31, 8, 17, 23, 40, 12, 9)


class Words(nn.Module):
    """A word says which one follows."""

    def __init__(self, dropout: float = 0.0, *, has_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 32)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(32) if has_norm else nn.Identity()
        self.head = nn.Linear(32, 64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.dropout(self.embedding(words).tanh())))
        return found


def texts() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (length,), generator=generator) for length in LENGTHS]


def tokens(batch: Batch) -> int:
    return sum(len(text) - 1 for text in batch)


def total(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of all label tokens."""
    words, labels = torch.cat([text[:-1] for text in batch]), torch.cat([text[1:] for text in batch])
    return F.cross_entropy(model(words), labels, reduction="sum")


def over_the_batch(model: nn.Module) -> Callable[[Batch, Batch], torch.Tensor]:
    return lambda part, batch: total(model, part) / tokens(batch)


def over_the_micro_batch(model: nn.Module) -> Callable[[Batch, Batch], torch.Tensor]:
    return lambda part, batch: total(model, part) / tokens(part) * len(part) / len(batch)


def not_divided(model: nn.Module) -> Callable[[Batch, Batch], torch.Tensor]:
    return lambda part, _: sum(total(model, [text]) / tokens([text]) for text in part) / len(part)  # type: ignore[return-value]  # sum() starts at an int


def divided_twice(model: nn.Module) -> Callable[[Batch, Batch], torch.Tensor]:
    once = not_divided(model)
    return lambda part, batch: once(part, batch) * (len(part) / len(batch)) ** 2


def contrastive(model: nn.Module) -> Callable[[Batch, Batch], torch.Tensor]:
    def loss(part: Batch, batch: Batch) -> torch.Tensor:
        first, last = (torch.stack([model(text)[place] for text in part]) for place in (0, -1))
        return F.cross_entropy(first @ last.T, torch.arange(len(part))) * len(part) / len(batch)

    return loss


def in_bfloat16(make: Callable[[nn.Module], Callable[[Batch, Batch], torch.Tensor]]) -> Any:
    def wrapped(model: nn.Module) -> Callable[[Batch, Batch], torch.Tensor]:
        def loss(part: Batch, batch: Batch) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return make(model)(part, batch)

        return loss

    return wrapped


@pytest.mark.parametrize(
    ("make", "cause", "says"),
    [
        (over_the_micro_batch, Cause.AVERAGED, "averaged in each micro-batch"),
        (in_bfloat16(over_the_micro_batch), Cause.AVERAGED, "averaged in each micro-batch"),
        (not_divided, Cause.SCALED, "4 times too large"),
        (divided_twice, Cause.SCALED, "4 times too small"),
        (contrastive, Cause.TOGETHER, "in-batch negatives"),
        (in_bfloat16(contrastive), Cause.TOGETHER, "in-batch negatives"),
    ],
)
def test_what_makes_gradients_depend_on_the_micro_batch_is_named(make: Any, cause: Cause, says: str) -> None:
    model = Words()
    found = bexp.check_accumulation(model, make(model), texts(), 2)
    assert not found.agrees
    assert found.difference > 3 * found.spread
    assert found.cause is cause
    text = " ".join(found.text.split())
    assert says in text
    assert f"norm {found.norm:.6g}" in text
    assert f"norm {found.accumulated_norm:.6g}" in text


def test_two_mistakes_at_once_are_both_named() -> None:
    model = Words()
    found = bexp.check_accumulation(model, lambda part, _: total(model, part) / tokens(part), texts(), 2)
    assert found.cause is Cause.AVERAGED
    assert "is not divided by the number of micro-batches" in " ".join(found.text.split())


def test_batch_norm_is_named_and_its_running_statistics_stay() -> None:
    model = Words(has_norm=True)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = bexp.check_accumulation(model, over_the_batch(model), texts(), 4)
    assert (found.agrees, found.cause) == (False, Cause.BATCH_NORM)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert model.norm.training


def test_equal_numbers_of_tokens_hide_a_loss_that_is_averaged() -> None:
    model = Words()
    equal = [text[:5] for text in texts()]
    assert bexp.check_accumulation(model, over_the_micro_batch(model), equal, 2).agrees


def test_a_model_is_left_as_it_was() -> None:
    model = Words(0.3)
    over_the_batch(model)(texts(), texts()).backward()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = [parameter.grad for parameter in model.parameters()]
    torch.manual_seed(7)
    state = torch.get_rng_state()
    bexp.check_accumulation(model, over_the_batch(model), texts())
    assert [parameter.grad for parameter in model.parameters()] == gradients
    assert all(map(torch.equal, weights, model.parameters()))
    assert torch.equal(state, torch.get_rng_state())
    assert (model.dropout.p, model.training) == (0.3, True)


def test_what_is_random_beside_dropout_is_refused() -> None:
    model = Words()

    def masked(part: Batch, batch: Batch) -> torch.Tensor:
        drawn = [torch.where(torch.rand(len(text)) < 0.3, 0, text) for text in part]
        return total(model, drawn) / tokens(batch)

    with pytest.raises(ValueError, match="something is random apart from dropout"):
        bexp.check_accumulation(model, masked, texts(), 2)


@pytest.mark.parametrize(
    ("number", "size", "reason"),
    [(1, None, "nothing to accumulate"), (8, 3, "micro-batches of 3"), (8, 8, "micro-batches of 8"), (8, 0, "of 0")],
)
def test_a_batch_that_cannot_be_split_is_refused(number: int, size: int | None, reason: str) -> None:
    model = Words()
    with pytest.raises(CannotCheckError, match=reason):
        bexp.check_accumulation(model, over_the_batch(model), texts()[:number], size)


def test_gradients_that_are_no_numbers_are_refused() -> None:
    model = Words()
    with pytest.raises(CannotCheckError, match="not finite"):
        bexp.check_accumulation(model, lambda part, _: total(model, part) / 0, texts(), 2)
    with pytest.raises(CannotCheckError, match="zero"):
        bexp.check_accumulation(model, lambda part, _: total(model, part) * 0, texts(), 2)


class Fits:
    """A training whose micro-batches have memory up to a size."""

    num_devices = 1

    def __init__(self, most: int) -> None:
        self.most = most
        self.sizes: list[int] = []

    def gradient(self, parts: Parts, *, rounds_otherwise: bool = False, is_swapped: bool = False) -> Gradient:
        self.sizes.append(len(parts[0]))
        if len(parts[0]) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        return Gradient(1.0, {"weight": torch.ones(4) / 2})

    def steps(self, parts: Parts) -> list[Gradient]:
        raise AssertionError("they agree")

    def remedies(self) -> dict[Any, Any]:
        return {}


@pytest.mark.parametrize(("most", "size", "shape"), [(8, 2, (8, 2)), (5, 2, (4, 2)), (4, 4, (4, 2)), (2, 4, (2, 1))])
def test_the_largest_micro_batch_that_has_memory_is_compared(most: int, size: int, shape: tuple[int, int]) -> None:
    found: AccumulationCheck = check(Fits(most), 8, size)
    assert (found.large_micro_batch_size, found.micro_batch_size) == shape


def test_a_micro_batch_of_two_without_memory_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        check(Fits(1), 8, 2)


def test_a_large_gradient_is_kept_in_part_and_its_norm_is_exact() -> None:
    model = nn.Linear(4096, 2048, bias=False)
    model.weight.grad = torch.randn(2048, 4096, generator=torch.Generator().manual_seed(0))
    assert model.weight.numel() > SAMPLED
    first = Gradient.of(model)
    assert first.norm == pytest.approx(float(model.weight.grad.norm()), rel=1e-5)
    assert first.kinds["weight"].numel() <= SAMPLED
    model.weight.grad *= 1.5
    assert difference(first, Gradient.of(model)) == pytest.approx(0.5, rel=0.01)


def test_the_same_weights_of_all_layers_are_one_kind() -> None:
    assert kind_of("model.layers.3.mlp.experts.12.w1.weight") == "model.layers.*.mlp.experts.*.w1.weight"
    assert (kind_of("0.weight"), kind_of("w1.lora_A.weight")) == ("*.weight", "w1.lora_A.weight")


@pytest.mark.parametrize(
    ("sample", "number"),
    [
        ({"input_ids": [1, 2, 3]}, 3),
        ({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, 2),
        ({"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([-100, 2])}, 1),
        ({"input_ids": [1, 2, 3], "completion_mask": [0, 0, 1]}, 1),
        ({"prompt_ids": [1], "chosen_ids": [1, 2], "rejected_ids": [1, 2, 3]}, 6),
        ({"text": "words"}, None),
        (torch.tensor([1, 2]), None),
        (7, None),
    ],
)
def test_a_sample_says_how_many_label_tokens_it_has(sample: Any, number: int | None) -> None:
    assert label_tokens(sample) == number


def test_samples_are_taken_from_few_tokens_to_many_where_they_are_known() -> None:
    assert most_unequal([3, 1, 2]) == [1, 2, 0]
    assert most_unequal([3, None, 2]) == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_returns_what_is_off_by_about_one_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, dtype=dtype)
    x = torch.randn(64, 64).to(dtype)
    plain: list[torch.Tensor] = []
    layer.register_forward_hook(lambda _, __, out: plain.append(out.detach()))
    with rounded_otherwise(nn.Sequential(layer, nn.Tanh())):
        rounded = layer(x).detach()
    share = ((rounded - plain[0]).double() / plain[0].double()).abs()
    assert float(share.max()) <= 1.01 * torch.finfo(dtype).eps
    assert 0.05 < float((share > 0).double().mean()) < 0.95
    assert torch.equal(layer(x), plain[1]), "nothing is added afterwards"


def test_gradients_flow_as_if_nothing_was_added() -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with rounded_otherwise(layer):
        layer(x).sum().backward()
    assert layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, torch.full((4,), 2.0))


def test_what_a_layer_returns_beside_numbers_stays() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> Any:
            return x.argmax(), "text"

    with rounded_otherwise(model := Chooses()):
        assert model(torch.arange(3)) == (2, "text")


def test_the_losss_scale_changes_mantissas() -> None:
    assert math.frexp(LOSS_SCALE)[0] != 0.5


pytest.importorskip("transformers")


@pytest.fixture
def model() -> Any:
    """A model whose attention drops, and whose routers are noisy, by fields that are no modules."""
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=64,
            num_local_experts=4,
            attention_dropout=0.5,
            router_jitter_noise=0.5,
            output_router_logits=True,
        )
    )


def test_the_configuration_of_a_part_is_changed_as_well() -> None:
    config = PretrainedConfig()
    config.text_config = PretrainedConfig()
    config.text_config.layerdrop = 0.3
    model: Any = nn.Linear(1, 1)
    model.config = config
    with nothing_random(model):
        assert config.text_config.layerdrop == 0.0
    assert config.text_config.layerdrop == 0.3


def test_the_loss_of_routers_can_be_switched_off_where_there_is_one(model: Any) -> None:
    tokens = torch.arange(16)[None]
    switched_off = without_router_loss(model)
    assert switched_off is not None
    with nothing_random(model):
        whole = model(input_ids=tokens, labels=tokens)
        with switched_off():
            alone = model(input_ids=tokens, labels=tokens)
    assert bool(whole.loss > alone.loss)
    assert without_router_loss(nn.Linear(1, 1)) is None


def test_batch_norms_can_use_their_running_statistics_while_the_model_trains() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)) * 5
    switched_off = without_batch_statistics(model)
    assert switched_off is not None
    with switched_off():
        model.train()  # as a training step does
        assert_same_values([model(x)[:2]], [model(x[:2])])
    assert model[0].training
    assert relative_error(model(x)[:2], model(x[:2])) > 0.1
    assert without_batch_statistics(nn.Linear(1, 1)) is None
