# SPDX-License-Identifier: Apache-2.0
"""The draft heads of the dense main model, written for training; their names here are not those of published files.

Letters in shapes: B sequences, T positions, D hidden size, V vocabulary, N draft vocabulary, n taps.

Slot s of a row holds token x_s. EAGLE and EAGLE-3 read at slot t + 1 the token there and the main model's states of
token t; the MLP speculator and Medusa read the states alone, or with the tokens after them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo_model.model import MLP, Attention, Decoder, Linear, ModelShape, RMSNorm
from demo_model.mtp import rollout_attention

DRAFT_VOCAB_SIZE = 2048
MLP_DRAFTS, MLP_WIDTH, MLP_EPS = 3, 128, 1e-6
MEDUSA_HEADS = 4

KeysValues = tuple[Tensor, Tensor]


class HeadLayer(nn.Module):
    """A decoder layer without an input norm; queries, keys and values may read more than the residual stream."""

    def __init__(self, shape: ModelShape, num_inputs: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        for name in ("q_proj", "k_proj", "v_proj"):
            num_outputs = len(getattr(self.self_attn, name).weight)
            setattr(self.self_attn, name, Linear(num_inputs, num_outputs))
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(
        self, read: Tensor, residual: Tensor, tables: tuple[Tensor, Tensor], past: list[KeysValues]
    ) -> tuple[Tensor, KeysValues]:
        """Runs one drafting step over all slots, as `demo_model.mtp.rollout_layer` does.

        Args:
            read: `[B, T, num_inputs]`, what attention reads.
            residual: `[B, T, D]`.
            past: keys and values of the steps before.
        """
        keys_values = self.self_attn.keys_values(read, *tables)
        first, later = (past[0], [*past[1:], keys_values]) if past else (keys_values, [])
        attended = rollout_attention(self.self_attn.queries(read, *tables), first, later)
        x = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x)), keys_values


class Eagle(nn.Module):
    """EAGLE: a linear layer joins token and state, and the layer's output stands for the state after the norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size)
        self.layer = HeadLayer(shape, shape.hidden_size)

    def start(self, normed: Tensor, taps: Tensor) -> Tensor:
        """Returns the states of the main model that the first step reads, `[B, T, D]`."""
        return normed

    def step(
        self, embedded: Tensor, source: Tensor, tables: tuple[Tensor, Tensor], past: list[KeysValues]
    ) -> tuple[Tensor, KeysValues]:
        """Runs one drafting step; see `HeadLayer.forward`."""
        joined = torch.cat((embedded, source), dim=-1)
        x = F.linear(joined, self.fc.weight.to(joined.dtype), self.fc.bias.to(joined.dtype))
        return self.layer(x, x, tables, past)

    def logits(self, states: Tensor, decoder: Decoder) -> Tensor:
        """Maps the layer's output to logits `[..., V]`."""
        return decoder.logits(states)


class Eagle3(nn.Module):
    """EAGLE-3: reads states of several layers, and has a head of its own over frequent tokens.

    Attributes:
        draft_ids: `[N]` int64, the tokens that the head predicts, in ascending order.
    """

    draft_ids: Tensor

    def __init__(self, shape: ModelShape, num_taps: int) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.norm_eps
        self.fc = Linear(num_taps * hidden, hidden)
        self.input_layernorm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.layer = HeadLayer(shape, 2 * hidden)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = Linear(hidden, DRAFT_VOCAB_SIZE)
        self.register_buffer("draft_ids", torch.zeros(DRAFT_VOCAB_SIZE, dtype=torch.int64))

    def use_vocabulary(self, draft_ids: Tensor, decoder: Decoder) -> None:
        """Chooses the tokens to predict; the head starts as these rows of the main model's."""
        self.draft_ids.copy_(draft_ids)
        with torch.no_grad():
            self.lm_head.weight.copy_(decoder.embed_tokens.weight[draft_ids])

    def start(self, normed: Tensor, taps: Tensor) -> Tensor:
        """Returns the joined taps, `[B, T, D]`."""
        return self.fc(taps)

    def step(
        self, embedded: Tensor, source: Tensor, tables: tuple[Tensor, Tensor], past: list[KeysValues]
    ) -> tuple[Tensor, KeysValues]:
        """Runs one drafting step; see `HeadLayer.forward`."""
        read = torch.cat((self.input_layernorm(embedded), self.hidden_norm(source)), dim=-1)
        return self.layer(read, source, tables, past)

    def draft_logits(self, states: Tensor) -> Tensor:
        """Maps the layer's output to logits of the draft vocabulary, `[..., N]`."""
        return self.lm_head(self.norm(states))


def unroll(head: Eagle | Eagle3, decoder: Decoder, tokens: Tensor, source: Tensor, num_steps: int) -> list[Tensor]:
    """Runs a head recursively along given tokens, from every slot at once.

    Args:
        tokens: `[B, L]`.
        source: what the first step reads of those tokens, `[B, L, D]`.

    Returns:
        Per step k the layer's outputs `[B, L - 1, D]` at slots 1 .. L - 1, as `demo_model.mtp.rollout` does.
    """
    num_slots = tokens.shape[1]
    tables = decoder.cos[1:num_slots], decoder.sin[1:num_slots]
    embedded = decoder.embed(tokens[:, 1:], source.dtype)
    source, states, past = source[:, :-1], [], []
    for _ in range(num_steps):
        state, keys_values = head.step(embedded, source, tables, past)
        states.append(state)
        past.append(keys_values)
        source = F.pad(state, (0, 0, 1, 0))[:, :-1]
    return states


class ScaledNorm(nn.Module):
    """The norm of an MLP speculator: root mean square, times a weight, plus a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return (without_scale(x.float()) * self.weight + self.bias).to(x.dtype)


def without_scale(x: Tensor) -> Tensor:
    """Divides by the root mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + MLP_EPS)


class MLPSpeculator(nn.Module):
    """IBM's MLP speculator with tied weights and a scaled input."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, MLP_WIDTH)
        nn.init.normal_(self.embed_tokens.weight, std=MLP_WIDTH**-0.5)
        self.proj = nn.ModuleList([Linear(shape.hidden_size, MLP_WIDTH), Linear(MLP_WIDTH, MLP_WIDTH)])
        self.ln = ScaledNorm(MLP_WIDTH)
        self.lm_head = Linear(MLP_WIDTH, shape.vocab_size)
        state_weight = 0.5 ** (0.5 / MLP_DRAFTS)
        self.embedding_ratio = math.sqrt((1 - state_weight**2) * MLP_WIDTH / 2) / state_weight

    def states(self, tokens: Tensor, normed: Tensor) -> list[Tensor]:
        """Returns the states of each draft along given tokens, `[B, L - MLP_DRAFTS, MLP_WIDTH]`.

        Row t of draft i starts from the main model's state of token t and predicts token t + 2 + i.
        """
        num_rows = tokens.shape[1] - MLP_DRAFTS
        state, states = (without_scale(normed[:, :num_rows].float()) / math.sqrt(2)).to(normed.dtype), []
        for i in range(MLP_DRAFTS):
            embedded = self.embed_tokens(tokens[:, i + 1 : i + 1 + num_rows]).to(state.dtype)
            state = F.gelu(self.ln(self.proj[min(i, 1)](state) + self.embedding_ratio * embedded))
            states.append(state)
        return states


class Medusa(nn.Module):
    """Medusa with one residual block per head and the main model's head on top."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(shape.hidden_size, shape.hidden_size) for _ in range(MEDUSA_HEADS)])
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)

    def states(self, normed: Tensor) -> list[Tensor]:
        """Returns per head the states `[B, T, D]` that the main model's head reads; head i predicts token t + 2 + i."""
        return [
            normed + F.silu(F.linear(normed, block.weight.to(normed.dtype), block.bias.to(normed.dtype)))
            for block in self.blocks
        ]
