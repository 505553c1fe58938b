"""Models of transformers that are set up, on a CUDA device: how far from float64 they are, and what they hold."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.causal_loss import causal_cross_entropy
from bexp.transformers.experts import OURS, expert_modules, unsupported_reason
from bexp.transformers.layers import decoder_layers
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings, SettingsError
from tests.bexp.kernels import expert_cases, references
from tests.gpu.needs import one_gpu

pytestmark = one_gpu()
transformers = pytest.importorskip("transformers")
DEVICE = torch.device("cuda", 0)

SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4}
TYPES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "olmoe": {**SIZES, **EXPERTS},
    "qwen3_moe": {**SIZES, **EXPERTS, "moe_intermediate_size": 256, "head_dim": 64},
}
CASES = {
    "few rows an expert": expert_cases.ExpertCase("few", 64, 16, 2, hidden=128, width=192, skew=1.0),
    "many rows an expert": expert_cases.ExpertCase("many", 2048, 8, 2, hidden=256, width=384),
    "no multiple of a tile": expert_cases.ExpertCase("odd", 1500, 8, 3, hidden=264, width=200, skew=1.0),
    "plain": expert_cases.ExpertCase("plain", 1500, 8, 2, hidden=264, width=200, gated=False, activation="gelu"),
}
# A kernel reads one of the two weights, so that only one case needs them to lie in different ways.
LYING = [
    *((case, transposed, transposed) for case in CASES for transposed in (True, False)),
    *(("no multiple of a tile", transposed, not transposed) for transposed in (True, False)),
]
FFN = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Activation], Tensor]


def fused(*args: Any) -> Tensor:
    from bexp.kernels.experts.fused.function import fused_ffn

    return fused_ffn(*args)


def fused_without_hopper(*args: Any) -> Tensor:
    from bexp.kernels.experts.fused.function import fused_ffn
    from bexp.kernels.experts.fused.tiles import default_tiles

    routes, w_in, w_out = args[1], args[3], args[4]
    gated = w_in.shape[2] == 2 * w_out.shape[1]
    ffn: Any = fused_ffn
    out: Tensor = ffn(*args, tiles=default_tiles(*routes.shape, w_in.shape[0], gated, 2))
    return out


def fused_on_hopper(*args: Any) -> Tensor:
    from bexp.kernels.experts.fused.function import fused_ffn
    from bexp.kernels.experts.fused.hopper_support import has_hopper_kernels
    from tests.gpu.fused_paths import ON_HOPPER

    if not has_hopper_kernels(DEVICE):
        pytest.skip("needs compute capability 9.0 and its Gluon")
    ffn: Any = fused_ffn
    out: Tensor = ffn(*args, tiles=ON_HOPPER)
    return out


def fused_operator(*args: Any) -> Tensor:
    from bexp.kernels.experts.fused.operators import fused_experts

    out: Tensor = fused_experts(*args, True)[0]
    return out


def hopper_grouped(
    x: Tensor, routes: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    from bexp.kernels.experts.registry import expert_backend

    return expert_backend("hopper_grouped").forward(x, routes, weights, w_in, w_out, activation)


IMPLEMENTATIONS: dict[str, FFN] = {
    "fused": fused,
    "fused, Triton only": fused_without_hopper,
    "fused, Hopper": fused_on_hopper,
    "fused, operator": fused_operator,
    "hopper_grouped": hopper_grouped,
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("case", "in_transposed", "out_transposed"), LYING)
def test_weights_are_read_as_they_lie(
    implementation: str, case: str, in_transposed: bool, out_transposed: bool
) -> None:
    if implementation == "hopper_grouped" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    problem = CASES[case]
    routes, (x, weights, w_in, w_out, grad) = expert_cases.problem(problem, torch.bfloat16, DEVICE)
    lying = [x, weights, *map(expert_cases.transposed_storage, (w_in, w_out), (in_transposed, out_transposed)), grad]
    inputs = references.leaves(lying[:4], torch.bfloat16)
    out = IMPLEMENTATIONS[implementation](inputs[0], routes, inputs[1], inputs[2], inputs[3], problem.activation)
    out.backward(grad)
    found = [out, *(tensor.grad for tensor in inputs)]
    for actual, wanted in zip(found, expert_cases.expected(problem, routes, lying), strict=True):
        assert references.relative_error(actual, wanted) <= 2e-2
    for tensor, transposed in zip(inputs[2:], (in_transposed, out_transposed), strict=True):
        assert tensor.grad is not None
        assert tensor.grad.is_contiguous() is not transposed


def model_of(model_type: str, dtype: torch.dtype, types: dict[str, dict[str, Any]] = TYPES) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **types[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.to(DEVICE, dtype).train()  # float64 starts from the numbers that bfloat16 has


def batch(size: int = 4, length: int = 512) -> dict[str, Tensor]:
    tokens = torch.randint(3, SIZES["vocab_size"], (size, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens.to(DEVICE), "labels": tokens.to(DEVICE)}


def first_experts(model: Any) -> Any:
    return expert_modules(model)[0]


def gradients(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: references.relative_error(found[name], exact[name]) for name in exact}


def test_a_pinned_back_end_without_a_kernel_for_grouped_queries_says_so() -> None:
    model = model_of("llama", torch.bfloat16)
    set_up(model, Settings(attention="sdpa:efficient"))
    with pytest.raises(
        SettingsError, match=r"efficient attention has no kernel for queries \(4, 8, 512, 64\), keys \(4, 4"
    ):
        gradients(model, batch())


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_that_is_set_up_is_no_further_from_float64(model_type: str) -> None:
    """Routes are chosen by bfloat16 numbers, and a token that changes its expert moves a gradient as a whole: so the
    errors are compared in sum, with a tenth to spare, and each gradient with a factor of two."""
    inputs = batch()
    plain = model_of(model_type, torch.bfloat16)
    exact = copy.deepcopy(plain).double()
    if model_type != "llama":
        exact.set_experts_implementation("eager")
    wanted = gradients(exact, inputs)
    del exact
    stock = errors(gradients(plain, inputs), wanted)
    choices = [
        Settings(attention="sdpa:flash"),
        Settings(attention="sdpa:cudnn"),
        Settings(loss="chunked"),
        Settings(bta_tile=2),
        Settings(recompute="full"),
        Settings(recompute="activations"),
        Settings(recompute="projections"),
        Settings(recompute="layers_1", bta_tile=1, loss="chunked"),
    ]
    if model_type != "llama" and unsupported_reason(first_experts(plain), "bexp_fused") is None:
        choices += [Settings(experts="bexp_fused", loss="chunked", bta_tile=2, recompute="activations")]
    for settings in choices:
        applied = set_up(plain, settings, strict=True, chunk=512)
        found = errors(gradients(plain, inputs), wanted)
        applied.undo()
        assert sum(found.values()) <= 1.1 * sum(stock.values()), (settings, found, stock)
        worse = {name: (found[name], stock[name]) for name in stock if found[name] > 2 * stock[name] + 1e-3}
        assert not worse, (settings, worse)


@functools.lru_cache(maxsize=1)
def model_with_references(model_type: str, adapters: str) -> tuple[Any, dict[str, Tensor], dict[str, float]]:
    """A model in bfloat16, what float64 computes with its numbers, and the errors of the library's loop.

    `adapters` lie on no weights, on attention alone, or on experts in one tensor.
    """
    model: Any = model_of(model_type, torch.bfloat16)
    model.set_experts_implementation("eager")
    if adapters != "none":
        peft = pytest.importorskip("peft")
        on_experts = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
        chosen = on_experts if adapters == "experts" else {"target_modules": ["q_proj"]}
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, **chosen), autocast_adapter_dtype=False)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # begins at zero, where the gradient of the other half is zero, too
                parameter.data.normal_(0.0, 0.02)
    wanted = gradients(copy.deepcopy(model).double(), batch())
    return model, wanted, errors(gradients(model, batch()), wanted)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about what peft asks it
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("adapters", ["none", "attention", "experts"])
@pytest.mark.parametrize("model_type", [name for name in TYPES if name != "llama"])
def test_experts_that_are_set_are_no_further_from_float64(
    model_type: str, adapters: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errors are compared as above. Weights keep their names, shapes and places."""
    monkeypatch.setenv("LIGER_FUSED_MOE_AUTOTUNE", "0")  # which takes minutes
    model, wanted, stock = model_with_references(model_type, adapters)
    inner = model if adapters == "none" else model.get_base_model()
    if (reason := unsupported_reason(first_experts(inner), name)) is not None:
        pytest.skip(reason)
    before = {key: (tuple(value.shape), value.data_ptr()) for key, value in model.state_dict().items()}
    applied = set_up(inner, Settings(experts=name), strict=True)
    try:
        found = errors(gradients(model, batch()), wanted)
    finally:
        applied.undo()
    assert {key: (tuple(value.shape), value.data_ptr()) for key, value in model.state_dict().items()} == before
    assert sum(found.values()) <= 1.1 * sum(stock.values()), (found, stock)
    worse = {key: (found[key], stock[key]) for key in stock if found[key] > 2 * stock[key] + 1e-3}
    assert not worse, worse


@pytest.mark.parametrize("capped", [False, True])
def test_the_chunked_loss_is_hardly_further_from_float64_than_full_logits(capped: bool) -> None:
    """The gradient of h is rounded to bfloat16 in forward, and again when backward scales it: up to sqrt(2) times the
    error of one rounding. The gradient of w is kept in float32 until then."""
    torch.manual_seed(0)
    h = torch.randn(3000, 256, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(5000, 256, device=DEVICE, dtype=torch.bfloat16) / 16
    targets = torch.randint(0, 5000, (3000,), device=DEVICE)
    targets[::7] = -100

    def cap(logits: Tensor) -> Tensor:
        return torch.tanh(logits / 30.0) * 30.0 if capped else logits

    def full(h: Tensor, w: Tensor) -> Tensor:
        logits = cap(torch.nn.functional.linear(h, w))
        return torch.nn.functional.cross_entropy(logits if h.dtype is torch.float64 else logits.float(), targets)

    def chunked(h: Tensor, w: Tensor) -> Tensor:
        total = causal_cross_entropy(h, w, None, targets, transform=cap if capped else None, chunk=256)
        return total / (targets != -100).sum()

    def run(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = references.leaves([h, w], dtype)
        value = loss(*leaves)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    exact = run(full, torch.float64)
    factors = (1.1, 1.5, 1.1)
    for found, stock, wanted, factor in zip(run(chunked, h.dtype), run(full, h.dtype), exact, factors, strict=True):
        assert references.relative_error(found, wanted) <= factor * references.relative_error(stock, wanted) + 1e-6


def test_the_chunked_loss_holds_no_logits() -> None:
    model = model_of("llama", torch.bfloat16)
    inputs = batch(16)
    logits = 16 * 512 * SIZES["vocab_size"] * 4

    def peak() -> int:
        gradients(model, inputs)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(model, inputs)
        return torch.cuda.max_memory_allocated() - before

    stock = peak()
    set_up(model, Settings(loss="chunked"), chunk=512)
    assert peak() <= stock - logits


def test_no_weight_is_copied_in_a_step() -> None:
    model = model_of("olmoe", torch.bfloat16)
    first: Any = decoder_layers(model)[0]
    experts = first.mlp.experts
    reason = unsupported_reason(experts, "bexp_fused")
    if reason is not None:
        pytest.skip(reason)
    set_up(model, Settings(experts="bexp_fused"))
    places = {p.data_ptr() for p in (experts.gate_up_proj, experts.down_proj)}
    kept: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch(), use_cache=False).loss
    assert places <= kept
    loss.backward()
    assert experts.gate_up_proj.grad.is_contiguous()
    assert experts.down_proj.grad.is_contiguous()


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own parts, and of full float32
def test_compiled_layers_keep_the_loss() -> None:
    model = model_of("olmoe", torch.bfloat16)
    batches = (batch(), batch(3, 256), batch(2, 768))  # from the second on, sizes are symbols of the compiler's
    wanted = [gradients(model, inputs)["loss"] for inputs in batches]
    applied = set_up(model, Settings(compile=True, experts="bexp_fused", loss="chunked"))
    found = [gradients(model, inputs)["loss"] for inputs in batches]
    applied.undo()
    for actual, expected in zip(found, wanted, strict=True):
        assert references.relative_error(actual, expected) <= 1e-3


LIGER_TYPES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma2", "olmo2"), SIZES),
    "qwen3_moe": TYPES["qwen3_moe"],
}


@pytest.mark.parametrize("model_type", LIGER_TYPES)
def test_ligers_kernels_are_no_further_from_float64(model_type: str) -> None:
    """The errors are compared in sum, and each gradient's with a factor of two: kernels round at other places."""
    pytest.importorskip("liger_kernel")
    inputs = batch()
    plain = model_of(model_type, torch.bfloat16, LIGER_TYPES)
    exact = copy.deepcopy(plain).double()
    if model_type == "qwen3_moe":
        exact.set_experts_implementation("eager")
    wanted = gradients(exact, inputs)
    del exact
    stock = gradients(plain, inputs)
    far = errors(stock, wanted)
    loss: Any = "chunked" if model_type == "gemma2" else "liger"  # liger's caps no logits that are capped already
    for settings in (Settings(kernels="liger"), Settings(kernels="liger", recompute="full", loss=loss)):
        applied = set_up(plain, settings, strict=True, chunk=512)
        found = errors(gradients(plain, inputs), wanted)
        applied.undo()
        assert sum(found.values()) <= 1.25 * sum(far.values()), (settings, found, far)
        worse = {name: (found[name], far[name]) for name in far if found[name] > 2 * far[name] + 1e-3}
        assert not worse, (settings, worse)
    again = gradients(plain, inputs)
    assert all(references.relative_error(again[name], stock[name]) <= 1e-2 for name in stock)


def test_a_job_may_choose_ligers_kernels() -> None:
    """The probe's own check passes with the real package."""
    pytest.importorskip("liger_kernel")
    from bexp.workers.instruments.device_instruments import Instruments
    from bexp.workers.targets.transformers.target import TransformersTarget
    from tests.workers.targets.transformers.targets import HARDWARE, LLAMA, request_for

    target = TransformersTarget(
        request_for(LLAMA, kernels=["library", "liger"], losses=["library", "liger"]), Instruments(DEVICE)
    )
    report = target.report(HARDWARE)
    for found in (report.choices["kernels"], report.choices["loss"]):
        assert {each.name: each.reason for each in found} == {"library": None, "liger": None}
