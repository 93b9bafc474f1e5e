# SPDX-License-Identifier: Apache-2.0
"""A layer for multi-token prediction with latent attention and experts, in Paddle operators, which can be trained."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from tests.models.latent_definition import LatentForm, chosen_experts
from tests.models.mtp_training import DefinedLayer, Tensors, draw


class LatentLayer(DefinedLayer):
    """A layer of DeepSeek's form with the decoder layer of its target's last one; its router is not trained."""

    def __init__(self, config: LatentForm, seed: int, target: Tensors) -> None:
        """Draw random weights.

        Args:
            target: tensors of the target, whose last layer gives the sizes, the biases, the router and what the norms
                of latent attention follow.
        """
        super().__init__("deepseek", config, seed, target=target)

    def draw_block(self, target: Tensors) -> Tensors:
        prefix = f"model.layers.{self.config.num_layers - 1}."
        stored = {name.removeprefix(prefix): w for name, w in sorted(target.items()) if name.startswith(prefix)}
        return {name: w.clone() if is_kept(name) else draw_like(w.shape) for name, w in stored.items()}

    def trained_weights(self) -> list[Tensor]:
        return [weight for name, weight in self.weights.items() if ".mlp.gate." not in name]

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x * (mean + (self.config.rms_norm_eps if eps is None else eps)).rsqrt() * self.weight(name)

    def linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.weights.get(f"{self.names['block']}.{name}.bias")
        out = super().linear(name, x)
        return out if bias is None else out + bias

    def attention(self, x: Tensor) -> Tensor:
        form, (batch, length, _) = self.config, x.shape

        def heads(y: Tensor) -> Tensor:
            return y.reshape([batch, length, form.num_heads, -1]).transpose([0, 2, 1, 3])

        query = heads(self.query(x))
        row = self.linear("self_attn.kv_a_proj_with_mqa", x)
        latent = self.norm("self_attn.kv_a_layernorm", row[..., : form.kv_lora], form.kv_eps)
        expanded = heads(self.linear("self_attn.kv_b_proj", latent))
        rotary = self.rotate(row[:, None, :, form.kv_lora :]).expand([batch, form.num_heads, length, form.rotary_dim])
        key = paddle.concat([expanded[..., : form.nope_dim], rotary], axis=-1)
        query = paddle.concat([query[..., : form.nope_dim], self.rotate(query[..., form.nope_dim :])], axis=-1)
        scale = (form.nope_dim + form.rotary_dim) ** -0.5 * form.score_factor
        return self.attend(query, key, expanded[..., form.nope_dim :], scale)

    def query(self, x: Tensor) -> Tensor:
        if f"{self.names['block']}.self_attn.q_proj.weight" in self.weights:
            return self.linear("self_attn.q_proj", x)
        latent = self.norm("self_attn.q_a_layernorm", self.linear("self_attn.q_a_proj", x), self.config.q_eps)
        return self.linear("self_attn.q_b_proj", latent)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate [B, heads, T, rotary_dim]; row 0 is at position 1. Members of pairs end in separate halves."""
        form = self.config
        angles = np.outer(np.arange(1, x.shape[2] + 1), form.frequencies)
        cos, sin = (paddle.to_tensor((f(angles) * form.magnitude).astype(np.float32)) for f in (np.cos, np.sin))
        a, b = (x[..., 0::2], x[..., 1::2]) if form.is_interleaved else x.chunk(2, axis=-1)
        return paddle.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def mlp(self, x: Tensor, name: str = "mlp") -> Tensor:
        rows = x.reshape([-1, x.shape[-1]])
        weights = self.routing_weights(rows)
        gate, up, down = (self.experts(part, weights.shape[1]) for part in ("gate_proj", "up_proj", "down_proj"))
        gated = F.silu(paddle.matmul(rows, gate, transpose_y=True)) * paddle.matmul(rows, up, transpose_y=True)
        routed = (paddle.matmul(gated, down, transpose_y=True) * weights.t()[:, :, None]).sum(0)
        return (routed + super().mlp(rows, "mlp.shared_experts")).reshape(x.shape)

    def experts(self, part: str, count: int) -> Tensor:
        """Return a weight of all experts: [experts, out, in]."""
        return paddle.stack([self.weight(f"mlp.experts.{expert}.{part}") for expert in range(count)])

    def routing_weights(self, rows: Tensor) -> Tensor:
        """Return the weight [T, experts] of each expert for each row, 0 for those that are not chosen."""
        form, logits = self.config, self.linear("mlp.gate", rows)
        scores = F.softmax(logits) if form.scoring == "softmax" else F.sigmoid(logits)
        bias = self.weights.get(f"{self.names['block']}.mlp.gate.e_score_correction_bias")
        choice = scores if bias is None else scores + bias
        weights = scores * paddle.to_tensor(chosen_experts(form, choice.numpy()).astype(np.float32))
        if form.is_normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * form.routed_scale


def is_kept(name: str) -> bool:
    """Return whether a weight starts as the target's, with values drawn so that each part of the model counts."""
    return name.startswith("mlp.gate.") or "_a_proj" in name or name.endswith(".bias")


def draw_like(shape: list[int]) -> Tensor:
    """Return random values of a linear layer, or the weights of a norm."""
    return paddle.ones(shape) if len(shape) == 1 else draw(shape)
