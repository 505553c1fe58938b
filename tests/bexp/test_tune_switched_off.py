"""What is random in a model is off for a while, and back afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from transformers import MixtralConfig, MixtralForCausalLM, PretrainedConfig

from bexp.tune.switched_off import nothing_random, without_batch_statistics, without_router_loss
from tests.bexp.kernels.references import assert_same_values, relative_error


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
