# SPDX-License-Identifier: Apache-2.0
"""The sparse feed-forward block of ERNIE-4.5-MoE, written for training.

Letters in shapes: N tokens, K experts per token, X experts, D hidden size, W expert width. An entry is a pair of a
token and one of its experts. Entries are sorted by expert, so that each expert's product is one dense matrix product,
and lie in a buffer of P rows in which each expert has a multiple of `GRANULE`, filled up with zeros: the library
prepares a product anew for each number of rows that it has not seen, which takes ten times as long as the product.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORM_MIN = 1e-12  # smallest divisor of the chosen scores
GRANULE = 32  # rows
FLOAT32_PARAMETERS = (".gate", ".correction_bias")  # a router's, which no number format of the model changes


@torch.library.custom_op("demo_model::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """Multiplies the entries of each expert by that expert's matrix.

    Args:
        x: `[P, in]`, sorted by expert.
        weight: `[X, out, in]`.
        starts: `[X + 1]` int64; expert e has the rows `starts[e] : starts[e + 1]`.

    Returns:
        `[P, out]`, zero after the last expert's rows.
    """
    out = x.new_zeros(len(x), weight.shape[1])
    for expert, (start, stop) in enumerate(pairwise(starts.tolist())):
        if start < stop:
            torch.mm(x[start:stop], weight[expert].mT, out=out[start:stop])
    return out


@torch.library.custom_op("demo_model::grouped_linear_gradients", mutates_args=())
def grouped_linear_gradients(grad: Tensor, x: Tensor, weight: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `grouped_linear` with respect to `x` and `weight`."""
    x_grad, weight_grad = torch.zeros_like(x), torch.zeros_like(weight)
    for expert, (start, stop) in enumerate(pairwise(starts.tolist())):
        if start < stop:
            torch.mm(grad[start:stop], weight[expert], out=x_grad[start:stop])
            torch.mm(grad[start:stop].mT, x[start:stop], out=weight_grad[expert])
    return x_grad, weight_grad


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


@grouped_linear_gradients.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep_inputs(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *grouped_linear_gradients(grad.contiguous(), *ctx.saved_tensors), None


grouped_linear.register_autograd(_backward, setup_context=_keep_inputs)


def with_zero_row(x: Tensor) -> Tensor:
    """Appends a row of zeros, which stands for no token."""
    return F.pad(x, (0, 0, 0, 1))


class Dispatch(torch.autograd.Function):
    """Copies tokens `[N, D]` to their entries `[P, D]`; the gradient of a token is the sum of its entries'.

    `sources` `[P]` holds the token of each row, or N; `places` `[N, K]` the rows of each token.
    """

    @staticmethod
    def forward(ctx, x: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return with_zero_row(x)[sources]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad[places].sum(1), None, None


class Combine(torch.autograd.Function):
    """Sums the entries `[P, D]` of each token to `[N, D]`: the transpose of `Dispatch`."""

    @staticmethod
    def forward(ctx, entries: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(sources)
        return entries[places].sum(1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (sources,) = ctx.saved_tensors
        return with_zero_row(grad)[sources], None, None


def arrange(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts the entries of tokens with experts `ids` `[N, K]`.

    Returns:
        counts `[X]`, the entries of each expert; starts `[X + 1]` of its rows; entries `[P]`, the entry in each row,
        numbered token * K + place, or N * K; and places `[N, K]`, the row of each entry.
    """
    flat = ids.flatten()
    counts = (flat[:, None] == torch.arange(num_experts, device=ids.device)).sum(0)
    starts = F.pad(((counts + GRANULE - 1) // GRANULE * GRANULE).cumsum(0), (1, 0))
    ranks = flat.argsort(stable=True).argsort() - (counts.cumsum(0) - counts)[flat]
    places = starts[flat] + ranks
    num_rows = len(flat) + num_experts * GRANULE
    entries = torch.full((num_rows,), len(flat), device=ids.device)
    entries = entries.scatter(0, places, torch.arange(len(flat), device=ids.device))
    return counts, starts, entries, places.view_as(ids)


class LoadAsGradient(torch.autograd.Function):
    """Passes weights on, and gives the correction bias `load - mean load` as its gradient.

    No loss depends on the bias smoothly, since it only takes part in the choice. Sent along as a gradient, the loads
    are summed over micro-batches and processes like all others, and the optimiser steps against their sign.
    """

    @staticmethod
    def forward(ctx, weights: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return weights.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (counts,) = ctx.saved_tensors
        load = counts.float()
        return grad, load - load.mean(), None


class SparseMLP(nn.Module):
    """Routed SwiGLU experts, of which each token uses a few, beside shared ones that every token uses.

    Attributes:
        gate: `[X, D]`, the router's matrix; its product is taken in float32.
        correction_bias: `[X]`, added to the scores for the choice only.
        gate_proj, up_proj: `[X, W, D]`.
        down_proj: `[X, D, W]`.
        shared_experts: a dense block of the shared experts' width, or None.
    """

    def __init__(self, hidden_size: int, num_experts: int, num_chosen: int, width: int, shared: nn.Module | None):
        super().__init__()
        self.num_chosen = num_chosen
        self.gate = nn.Parameter(torch.randn(num_experts, hidden_size) * 0.5 * hidden_size**-0.5)
        self.correction_bias = nn.Parameter(torch.zeros(num_experts))
        self.gate_proj = nn.Parameter(torch.randn(num_experts, width, hidden_size) * 0.5 * hidden_size**-0.5)
        self.up_proj = nn.Parameter(torch.randn(num_experts, width, hidden_size) * 0.5 * hidden_size**-0.5)
        self.down_proj = nn.Parameter(torch.zeros(num_experts, hidden_size, width))
        self.shared_experts = shared

    def scores(self, x: Tensor) -> Tensor:
        """Returns the scores `[N, X]` float32 of all experts for tokens `[N, D]`."""
        return F.linear(x.float(), self.gate.float()).softmax(-1)

    def choose(self, scores: Tensor) -> Tensor:
        """Returns the experts `[N, K]` int64 of tokens with the given scores."""
        return (scores.detach() + self.correction_bias.detach()).topk(self.num_chosen, dim=-1).indices

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns experts `[N, K]` int64 and their weights `[N, K]` float32 for tokens `[N, D]`."""
        scores = self.scores(x)
        ids = self.choose(scores)
        chosen = scores.gather(1, ids)
        return ids, chosen / chosen.sum(-1, keepdim=True).clamp_min(NORM_MIN)

    def forward(self, x: Tensor) -> Tensor:
        """Maps tokens `[..., D]` to the weighted sum of their experts plus the shared ones."""
        tokens = x.reshape(-1, x.shape[-1])
        ids, weights = self.route(tokens)
        counts, starts, entries, places = arrange(ids, len(self.gate))
        sources = entries // self.num_chosen
        weights = LoadAsGradient.apply(weights, self.correction_bias, counts)
        rows = Dispatch.apply(tokens, sources, places)
        gate_up = torch.cat((self.gate_proj, self.up_proj), dim=1).to(x.dtype)
        gate, up = grouped_linear(rows, gate_up, starts).chunk(2, dim=-1)
        # Scaling the activations instead of the outputs gives the same sum with fewer multiplications.
        scaled = (F.silu(gate) * up).float() * with_zero_row(weights.view(-1, 1))[entries]
        outputs = grouped_linear(scaled.to(x.dtype), self.down_proj.to(x.dtype), starts)
        routed = Combine.apply(outputs, sources, places).view_as(x)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)
