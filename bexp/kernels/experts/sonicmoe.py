"""SonicMoE (Guo et al., 2025, arXiv:2512.14080) of the package sonic-moe: quack's GEMMs in CuTe DSL.

sonic-moe 0.1.2 pins torch <= 2.9.1 and CuTe DSL 4.4.2, quack-kernels 0.6 needs CuTe DSL >= 4.7: install the first
without its dependencies, and all into a folder named site-packages, for quack takes no other code for installed. quack
tunes each GEMM by its sizes in the first run. Its gated GELU is the approximation by
tanh, which no model means by "gelu". Matrices are kept as (E, 2H, D) and (E, D, H).
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.package import package_reason, shape_reason
from bexp.kernels.shapes import ExpertsShape
from bexp.kernels.triton_support import launching_on, triton_reason

_PACKAGE = "sonic-moe"
_CAPABILITY = (9, 0)


def _forward(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    assert activation == "silu", "checked with the shape"
    if routes_TK.numel() == 0:
        return x_TD * 0.0
    sonicmoe = importlib.import_module("sonicmoe")
    silu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
    num_tokens, top_k = routes_TK.shape
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=x_TD.device).repeat_interleave(top_k)
    first, second = (w.mT.contiguous().permute(1, 2, 0) for w in (w_in, w_out))  # (2H, D, E) and (D, H, E)
    keep = torch.is_grad_enabled()
    with launching_on(x_TD.device):
        out: Tensor = sonicmoe.moe_general_routing_inputs(
            x_TD,
            weights_TK.reshape(-1).float(),
            tokens,
            routes_TK.reshape(-1).to(torch.int32),
            first,
            None,
            second,
            None,
            E=w_in.shape[0],
            stream_id=None,
            activation_type=silu,
            is_inference_mode_enabled=not keep,
            concat_layout=True,
        )[0]
    return out


def _check(shape: ExpertsShape, device: torch.device) -> str | None:
    reason = shape_reason(_PACKAGE, shape, (torch.bfloat16, torch.float16), gated_silu=True) or triton_reason(device)
    if reason is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        return f"{_PACKAGE} needs compute capability 9.0, not {capability[0]}.{capability[1]}"
    return package_reason(_PACKAGE, ("sonicmoe", "sonicmoe.enums"))


SONICMOE = ExpertBackend("sonicmoe", False, _check, _forward)
