# SPDX-License-Identifier: Apache-2.0
"""The definition of models with latent attention in NumPy: float64, whole sequences, keys and values of every head.

It reads folders without the package, so that a wrong reading of a configuration shows. `dataclasses.replace` on a form
leaves out a part or changes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.paddle import load_file

Floats = NDArray[np.float64]
Weights = dict[str, Floats]
BIASED = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "o_proj"})


@dataclass(frozen=True, eq=False)
class LatentForm:
    """What a configuration says about a model, and which parts of it count.

    Attributes:
        rms_norm_eps: of the norms of the layers and the final norm.
        q_eps, kv_eps: of the norms of the query's and the key's latent values.
        theta: base of the frequencies.
        frequencies: [rotary_dim / 2], angle per position.
        magnitude: factor of cosines and sines.
        score_factor: factor of the scores beside (nope_dim + rotary_dim) ** -0.5.
        is_interleaved: whether pairs (2i, 2i + 1) rotate, else (i, i + rotary_dim / 2).
        num_of_group: how many of a group's largest scores are its score.
        biased: names of the layers whose biases count.
        recycles_normed: whether a layer for multi-token prediction reads its own state after its norm.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    kv_lora: int
    nope_dim: int
    rotary_dim: int
    value_dim: int
    rms_norm_eps: float
    theta: float
    frequencies: Floats
    magnitude: float
    score_factor: float
    is_interleaved: bool
    scoring: str
    num_chosen: int
    num_groups: int
    num_kept: int
    num_of_group: int
    is_normalized: bool
    routed_scale: float
    q_eps: float = 1e-6
    kv_eps: float = 1e-6
    biased: frozenset[str] = BIASED
    has_q_norm: bool = True
    has_kv_norm: bool = True
    has_correction_bias: bool = True
    has_shared_experts: bool = True
    recycles_normed: bool = True


def read_form(config: Mapping[str, Any]) -> LatentForm:
    """Return the form of the model that a config.json describes, in the spelling of transformers 4 or 5."""
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    frequencies, magnitude, score_factor = read_rope(rope, config["qk_rope_head_dim"])
    is_v2 = config["model_type"] == "deepseek_v2"
    return LatentForm(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        kv_lora=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rotary_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        theta=rope["rope_theta"],
        frequencies=frequencies,
        magnitude=magnitude,
        score_factor=score_factor,
        is_interleaved=is_v2 or config.get("rope_interleave", True),
        scoring="softmax" if is_v2 else "sigmoid",
        num_chosen=config["num_experts_per_tok"],
        num_groups=config["n_group"],
        num_kept=config["topk_group"],
        num_of_group=1 if is_v2 else 2,
        is_normalized=not is_v2 and config["norm_topk_prob"],
        routed_scale=config["routed_scaling_factor"],
    )


def read_rope(rope: Mapping[str, Any], dim: int) -> tuple[Floats, float, float]:
    """Return frequencies, the factor of cosines and sines, and the factor of the scores, of `default` or `yarn`."""
    theta, exponents = rope["rope_theta"], np.arange(0, dim, 2) / dim
    plain = theta**-exponents
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return plain, 1.0, 1.0
    assert kind == "yarn"
    factor, original = rope["factor"], rope["original_max_position_embeddings"]

    def dim_of(num_turns: float) -> float:
        return dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    first, last = max(math.floor(dim_of(rope["beta_fast"])), 0), min(math.ceil(dim_of(rope["beta_slow"])), dim - 1)
    share = np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)  # of the frequency divided by the factor
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    ratio = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
    return plain * (1 - share + share / factor), ratio, magnitude(all_dim) ** 2 if all_dim else 1.0


def read_weights(*folders: Path) -> Weights:
    """Return the tensors of all files of the folders, in float64."""
    files = [file for folder in folders for file in sorted(folder.glob("*.safetensors"))]
    return {
        name: tensor.astype("float32").numpy().astype(np.float64)
        for file in files
        for name, tensor in load_file(file).items()
    }


class LatentDefinition:
    """A model, and its layer for multi-token prediction if the weights have one.

    Attributes:
        form: replaced by callers that leave out a part.
        weights: tensors by their names in the files.
        margins: of each row and sparse layer computed so far: by how much the worst chosen expert or group is better
            than the best that is not chosen.
    """

    def __init__(self, form: LatentForm, weights: Weights) -> None:
        self.form, self.weights = form, weights
        self.margins: list[float] = []
        self.mtp = f"model.layers.{form.num_layers}"

    def states(self, tokens: list[int]) -> Floats:
        """Return the states [T, hidden] after the final norm."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.form.num_layers):
            x = self.block(f"model.layers.{layer}", x)
        return self.norm("model.norm", x, self.form.rms_norm_eps)

    def logprobs(self, states: Floats, head: str = "lm_head") -> Floats:
        """Return log-probabilities [T, vocab] of states after the norm before the head."""
        logits = self.linear(head, states)
        shifted = logits - logits.max(-1, keepdims=True)
        normalized: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return normalized

    def draft_states(self, tokens: list[int], states: Floats) -> tuple[Floats, Floats]:
        """Return the layer's states [T, hidden] for tokens 1 .. T and states 0 .. T - 1: after its norm, and the ones
        that stand for the target's in the next draft."""
        embedded = self.norm(
            f"{self.mtp}.enorm", self.weights[f"{self.mtp}.embed_tokens.weight"][tokens], self.form.rms_norm_eps
        )
        joined = np.concatenate([embedded, self.norm(f"{self.mtp}.hnorm", states, self.form.rms_norm_eps)], axis=-1)
        x = self.block(self.mtp, self.linear(f"{self.mtp}.eh_proj", joined), first_position=1)
        normed = self.norm(f"{self.mtp}.shared_head.norm", x, self.form.rms_norm_eps)
        return normed, normed if self.form.recycles_normed else x

    def draft_logprobs(self, states: Floats) -> Floats:
        """Return log-probabilities [T, vocab] of the layer's states after its norm."""
        return self.logprobs(states, f"{self.mtp}.shared_head.head")

    def drafts(self, text: list[int], states: Floats) -> Iterator[tuple[int, Floats]]:
        """Yield the drafts after a text, each with log-probabilities [vocab].

        Args:
            states: [len(text) - 1 or more, hidden], the target's.
        """
        tokens, inputs = list(text), states[: len(text) - 1]
        while True:
            normed, recycled = self.draft_states(tokens[1:], inputs)
            logprobs = self.draft_logprobs(normed[-1:])[0]
            tokens.append(int(logprobs.argmax()))
            yield tokens[-1], logprobs
            inputs = np.concatenate([inputs, recycled[-1:]])

    def block(self, name: str, x: Floats, first_position: int = 0) -> Floats:
        x = x + self.attention(
            f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x, self.form.rms_norm_eps), first_position
        )
        y = self.norm(f"{name}.post_attention_layernorm", x, self.form.rms_norm_eps)
        return x + (self.experts if f"{name}.mlp.gate.weight" in self.weights else self.mlp)(f"{name}.mlp", y)

    def norm(self, name: str, x: Floats, eps: float) -> Floats:
        scaled: Floats = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.weights[f"{name}.weight"]
        return scaled

    def linear(self, name: str, x: Floats) -> Floats:
        out: Floats = x @ self.weights[f"{name}.weight"].T
        if name.rpartition(".")[2] in self.form.biased and f"{name}.bias" in self.weights:
            out = out + self.weights[f"{name}.bias"]
        return out

    def attention(self, name: str, x: Floats, first_position: int) -> Floats:
        form, length = self.form, len(x)
        query = self.query(name, x).reshape(length, form.num_heads, -1)
        row = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        latent, rotary = row[:, : form.kv_lora], row[:, form.kv_lora :]
        if form.has_kv_norm:
            latent = self.norm(f"{name}.kv_a_layernorm", latent, form.kv_eps)
        heads = self.linear(f"{name}.kv_b_proj", latent).reshape(length, form.num_heads, -1)
        rotary = self.rotate(rotary[:, None], first_position)[:, 0]
        scores = np.einsum("qhd,khd->hqk", query[..., : form.nope_dim], heads[..., : form.nope_dim])
        scores += np.einsum("qhd,kd->hqk", self.rotate(query[..., form.nope_dim :], first_position), rotary)
        scores *= (form.nope_dim + form.rotary_dim) ** -0.5 * form.score_factor
        probs = softmax(np.where(np.tri(length, dtype=bool), scores, -np.inf))
        attended = np.einsum("hqk,khd->qhd", probs, heads[..., form.nope_dim :]).reshape(length, -1)
        return self.linear(f"{name}.o_proj", attended)

    def query(self, name: str, x: Floats) -> Floats:
        if f"{name}.q_proj.weight" in self.weights:
            return self.linear(f"{name}.q_proj", x)
        latent = self.linear(f"{name}.q_a_proj", x)
        if self.form.has_q_norm:
            latent = self.norm(f"{name}.q_a_layernorm", latent, self.form.q_eps)
        return self.linear(f"{name}.q_b_proj", latent)

    def rotate(self, x: Floats, first_position: int) -> Floats:
        """Rotate [T, heads, rotary_dim] from a position on; the result has the pairs' members in separate halves."""
        angles = np.outer(np.arange(first_position, first_position + len(x)), self.form.frequencies)[:, None]
        cos, sin = np.cos(angles) * self.form.magnitude, np.sin(angles) * self.form.magnitude
        a, b = (x[..., 0::2], x[..., 1::2]) if self.form.is_interleaved else np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def mlp(self, name: str, x: Floats) -> Floats:
        gate = self.linear(f"{name}.gate_proj", x)
        return self.linear(f"{name}.down_proj", gate / (1 + np.exp(-gate)) * self.linear(f"{name}.up_proj", x))

    def experts(self, name: str, x: Floats) -> Floats:
        weights = self.routing_weights(name, x)
        out = self.mlp(f"{name}.shared_experts", x) if self.form.has_shared_experts else np.zeros_like(x)
        for expert in range(weights.shape[1]):
            rows = weights[:, expert] > 0
            out[rows] += weights[rows, expert, None] * self.mlp(f"{name}.experts.{expert}", x[rows])
        return out

    def routing_weights(self, name: str, x: Floats) -> Floats:
        """Return the weight [T, experts] of each expert for each row, 0 for those that are not chosen."""
        form = self.form
        logits = x @ self.weights[f"{name}.gate.weight"].T
        scores = softmax(logits) if form.scoring == "softmax" else 1 / (1 + np.exp(-logits))
        choice = scores
        bias = f"{name}.gate.e_score_correction_bias"
        if form.has_correction_bias and bias in self.weights:
            choice = scores + self.weights[bias]
        self.margins.extend(margins_of(form, choice))
        weights = np.where(chosen_experts(form, choice), scores, 0.0)
        if form.is_normalized:
            weights /= weights.sum(-1, keepdims=True)
        return weights * form.routed_scale


def chosen_experts(form: LatentForm, choice: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Return which experts [T, experts] are the best of the best groups, by scores for the choice of this shape."""
    masked, chosen = masked_choice(form, choice)[1], np.zeros(choice.shape, bool)
    chosen[np.arange(len(choice))[:, None], np.argsort(-masked, axis=-1)[:, : form.num_chosen]] = True
    return chosen


def masked_choice(form: LatentForm, choice: NDArray[np.floating]) -> tuple[Floats, Floats]:
    """Return the scores of the groups [T, groups], and the choice with -inf for experts of groups that are not kept."""
    groups = choice.reshape(len(choice), form.num_groups, -1)
    of_groups = np.sort(groups, axis=-1)[..., -form.num_of_group :].sum(-1)
    masked, kept = np.full_like(groups, -np.inf), np.argsort(-of_groups, axis=-1)[:, : form.num_kept]
    rows = np.arange(len(choice))[:, None]
    masked[rows, kept] = groups[rows, kept]
    return of_groups, masked.reshape(choice.shape)


def margins_of(form: LatentForm, choice: Floats) -> Floats:
    """Return the margin [T] of each row's experts or, if it is smaller, of its groups."""
    of_groups, masked = masked_choice(form, choice)
    return np.minimum(gap(of_groups, form.num_kept), gap(masked, form.num_chosen))


def gap(scores: Floats, count: int) -> Floats:
    """Return by how much the last of the `count` largest scores of each row exceeds the next one, if there is one."""
    ordered = np.sort(scores, axis=-1)
    next_one = ordered[:, -count - 1] if count < scores.shape[1] else -np.inf
    difference: Floats = ordered[:, -count] - next_one
    return difference


def softmax(x: Floats) -> Floats:
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    probs: Floats = exponentials / exponentials.sum(-1, keepdims=True)
    return probs


def load_definition(*folders: Path) -> LatentDefinition:
    """Return the model of the first folder, with the tensors of all of them."""
    return LatentDefinition(read_form(json.loads((folders[0] / "config.json").read_text())), read_weights(*folders))
