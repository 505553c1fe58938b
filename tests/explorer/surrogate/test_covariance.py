"""What components of one kind are expected to have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.surrogate.hyperparameters import Covariance


def level(*components: Component) -> np.ndarray[Any, Any]:
    return Covariance.of(components).level


def fixed(first: float, second: float | None = None) -> float:
    """The part of fixed costs that all back ends have in common, as a share of n sequences."""
    second = first if second is None else second
    return float(
        sum(std**2 * np.log1p(r / first) * np.log1p(r / second) for r, std in ((0.1, 0.3), (0.5, 0.3), (3.0, 0.1)))
    )


def test_a_block_without_kernels_of_a_choice_is_the_same_back_end_compiled_or_not() -> None:
    plain = Component(kind=ComponentKind.DENSE_FFN, micro_batch_size=4)
    compiled = Component.model_validate({**plain.model_dump(), "backend": "compiled"})
    assert compiled.is_compiled
    assert compiled.key == "dense_ffn(m=4,compiled)"
    found = level(plain, compiled)
    assert found[0, 1] == pytest.approx(found[0, 0])


def layer(backend: str, size: int = 1) -> Component:
    return Component.model_validate(
        {"kind": "layer", "part": "DecoderLayer", "micro_batch_size": size, "backend": backend}
    )


def test_attention_of_a_layer_is_shared_over_its_experts_and_the_reverse() -> None:
    found = level(layer("sdpa+fused"), layer("sdpa+grouped_mm"), layer("flash+fused"), layer("flash+grouped_mm"))
    apart = found[0, 3]
    assert found[0, 1] == pytest.approx(apart + 0.1**2)
    assert found[0, 2] == pytest.approx(apart + 0.25**2)
    kernels_own = 0.01**2 + 0.04**2 + 0.5**2 * fixed(1)  # together, of the mode, and fixed costs of the back end
    assert found[0, 0] == pytest.approx(apart + 0.1**2 + 0.25**2 + kernels_own)


def test_what_ligers_kernels_gain_says_what_the_compiler_gains() -> None:
    plain, liger, compiled = layer("sdpa"), layer("sdpa+liger"), layer("sdpa+compiled")
    found = level(plain, liger, compiled)
    gained = found[1, 1] - found[0, 0]
    assert gained == pytest.approx(0.35**2 + 0.06**2 + 0.04**2 + 0.2**2 * fixed(1))
    assert found[1, 2] - found[0, 1] == pytest.approx(gained - 0.06**2), "all but the way of fusing"


def test_layers_of_one_kind_have_more_in_common_than_two_kinds_with_one_back_end() -> None:
    full, sliding, other = layer("sdpa"), layer("sdpa"), layer("flash")
    sliding = sliding.model_copy(update={"part": "sliding"})
    alone, found = level(full, other), level(full, sliding, other)
    own = found[0, 0] - alone[0, 0]
    assert own == pytest.approx(0.3**2 + 0.2**2)
    assert found[0, 1] == pytest.approx(alone[0, 0]), "the same back end in another kind of layer"
    assert found[0, 2] - alone[0, 1] == pytest.approx(0.3**2), "another back end in the same kind"
    curve = Covariance.of([full, sliding, other]).curve
    assert curve[0, 1] == pytest.approx(0.9 * curve[0, 0])
