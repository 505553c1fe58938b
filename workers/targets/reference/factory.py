"""The blocks that the profiler times, by component."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.workers.instruments.kernel_shapes import torch_dtype
from bexp.workers.targets.extensions import extension_for
from bexp.workers.targets.reference.attention_block import AttentionBlock
from bexp.workers.targets.reference.ffn_block import DenseFFN, MoEFFN
from bexp.workers.targets.reference.head import Embedding, Head
from bexp.workers.targets.reference.weights import device_routes

Block = AttentionBlock | DenseFFN | MoEFFN | Embedding | Head


def build_block(
    model: ModelSpec,
    component: Component,
    request: ExplorationRequest,
    device: torch.device,
    *,
    generator: torch.Generator | None = None,
    w_tied: nn.Parameter | None = None,
    context_parallel: ContextParallel | None = None,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Return the module of `component`, with random weights on `device`, ready to run its micro-batch.

    In eval mode its parameters are frozen. An expert block has its routes drawn from the request's routing and seed. A
    component of an extension is built by that, for the ranks of `group` if there is one.

    `w_tied` is the embedding's weight for a head that shares it. `context_parallel` is for attention that the component
    spreads over several ranks, and gives an embedding its positions.

    Raises:
        ValueError: the component is the optimizer, which is no block, or its sequences cannot be spread.
    """
    if (extension := extension_for(component)) is not None:
        return extension.build_shard(model, component, request, device, generator=generator, w_tied=w_tied, group=group)
    training = request.mode == "train"
    local_length = local_seq_length(model, component)
    block: Block
    if component.kind is ComponentKind.EMBEDDING:
        positions = None if context_parallel is None else context_parallel.positions(model.seq_length, device)
        block = Embedding(model, device=device, training=training, generator=generator, positions=positions)
    elif component.kind is ComponentKind.ATTENTION:
        assert component.attention is not None, "an attention component names its back end"
        assert component.communicates is (context_parallel is not None), "ranks for attention that is spread over them"
        block = AttentionBlock(
            model,
            backend=component.attention,
            bta_tile=component.bta_tile,
            recompute=component.recompute,
            device=device,
            training=training,
            generator=generator,
            context_parallel=context_parallel,
        )
    elif component.kind is ComponentKind.DENSE_FFN:
        block = DenseFFN(model, recompute=component.recompute, device=device, training=training, generator=generator)
    elif component.kind is ComponentKind.MOE_FFN:
        assert component.experts is not None, "an expert component names its back end"
        block = MoEFFN(
            model,
            backend=component.experts,
            recompute=component.recompute,
            device=device,
            training=training,
            generator=generator,
        )
        if device.type != "meta":
            num_tokens = component.micro_batch_size * local_length
            block.set_routes(device_routes(model, request.routing, num_tokens, request.seed, device))
    elif component.kind is ComponentKind.HEAD:
        loss = request.training.loss
        block = Head(model, loss=loss, device=device, training=training, w_tied=w_tied, generator=generator)
    else:
        raise ValueError(f"{component.kind} is not a block of the model")
    if request.plain_execution.compiles or component.is_compiled:
        block.compile_core()
    return block


def local_seq_length(model: ModelSpec, component: Component) -> int:
    """Return the tokens of a sequence on each device. Raises ValueError if devices cannot have equally many."""
    length, rest = divmod(model.seq_length, component.context_parallel_size)
    if rest:
        raise ValueError(f"{component.context_parallel_size} devices cannot share {model.seq_length} tokens equally")
    return length


def example_inputs(
    model: ModelSpec,
    component: Component,
    device: torch.device,
    generator: torch.Generator | None = None,
    *,
    training: bool = False,
) -> tuple[Tensor, ...]:
    """Return random inputs of the component's block: tokens, hidden states, or hidden states and targets.

    Hidden states are standard normal in the model's dtype and, in training, ask for their gradient.
    """
    batch = (component.micro_batch_size, local_seq_length(model, component))
    if component.kind is ComponentKind.EMBEDDING:
        return (random_tokens(model, batch, device, generator),)
    shape = (*batch, model.hidden_size)
    x_BSD = torch.randn(shape, dtype=torch_dtype(model.dtype), device=device, generator=generator)
    x_BSD.requires_grad_(training)
    if component.kind is ComponentKind.HEAD:
        return x_BSD, random_tokens(model, batch, device, generator)
    return (x_BSD,)


def random_tokens(
    model: ModelSpec, shape: tuple[int, int], device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """Return token ids of the given shape, uniform over the vocabulary."""
    return torch.randint(model.vocab_size, shape, device=device, generator=generator)
