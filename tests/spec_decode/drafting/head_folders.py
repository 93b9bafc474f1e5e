# SPDX-License-Identifier: Apache-2.0
"""Folders of random heads for the demonstration model, in every form that the published files have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

HIDDEN, VOCAB, NUM_LAYERS, DRAFT_VOCAB, INNER = 256, 4096, 14, 320, 48
WIDTH, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 96, 64, 2, 1  # a GPU takes heads of 64
LAYER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
}
Tensors = dict[str, NDArray[Any]]


class Weights:
    """Random tensors by names."""

    def __init__(self, seed: int, hidden: int) -> None:
        self.random, self.tensors, self.hidden = np.random.default_rng(seed), Tensors(), hidden

    def linear(self, name: str, outputs: int, inputs: int, has_bias: bool = False) -> None:
        self.tensors[f"{name}.weight"] = self.random.normal(0, inputs**-0.5, (outputs, inputs)).astype(np.float32)
        if has_bias:
            self.tensors[f"{name}.bias"] = self.random.normal(0, 0.3, outputs).astype(np.float32)

    def norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = self.random.normal(1, 0.2, size).astype(np.float32)

    def layer(self, name: str, inputs: int, has_input_norm: bool, is_joint: bool, qk_norm: bool, bias: bool) -> None:
        for part, outputs in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
            self.linear(f"{name}.self_attn.{part}_proj", outputs * HEAD_DIM, inputs, bias)
        self.linear(f"{name}.self_attn.o_proj", self.hidden, NUM_HEADS * HEAD_DIM)
        for part in ("gate", "up"):
            self.linear(f"{name}.mlp.{part}_proj", WIDTH, self.hidden)
        self.linear(f"{name}.mlp.down_proj", self.hidden, WIDTH)
        self.norm(f"{name}.post_attention_layernorm", self.hidden)
        if has_input_norm:
            self.norm(f"{name}.input_layernorm", self.hidden)
        if is_joint:
            self.norm(f"{name}.hidden_norm", self.hidden)
        if qk_norm:
            for part in "qk":
                self.norm(f"{name}.self_attn.{part}_norm", HEAD_DIM)


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Path:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def eagle(
    folder: Path,
    seed: int = 0,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    fc_bias: bool = True,
    num_layers: int = 1,
    embedding: bool = False,
    prefix: str = "",
) -> Path:
    """Write a head of EAGLE."""
    weights = Weights(seed, hidden)
    weights.linear("fc", hidden, 2 * hidden, fc_bias)
    for index in range(num_layers):
        weights.layer(f"layers.{index}", hidden, index > 0, False, False, False)
    if embedding:
        weights.linear("embed_tokens", vocab, hidden)
    tensors = {f"{prefix}{name}": value for name, value in weights.tensors.items()}
    sizes = {"hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": num_layers}
    return write(folder, {**LAYER, **sizes, "bias": fc_bias}, tensors)


def eagle3(
    folder: Path,
    seed: int = 0,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    taps: int = 3,
    num_layers: int = 1,
    reduced: bool = True,
    embedding: bool = False,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    layer_name: str = "midlayer",
    **keys: Any,
) -> Path:
    """Write a head of EAGLE 3; `keys` are added to config.json."""
    weights, num_ids = Weights(seed, hidden), DRAFT_VOCAB if reduced else vocab
    if taps:
        weights.linear("fc", hidden, taps * hidden)
    if keys.get("fc_norm"):
        for index in range(taps):
            weights.norm(f"fc_norm.{index}", hidden)
    weights.layer(layer_name, 2 * hidden, True, True, qk_norm, qkv_bias)
    for index in range(1, num_layers):
        weights.layer(f"layers.{index}", hidden, True, False, qk_norm, qkv_bias)
    weights.norm("norm", hidden)
    weights.linear("lm_head", num_ids, hidden)
    if embedding:
        weights.linear("embed_tokens", vocab, hidden)
    tensors = weights.tensors
    if reduced:
        ids = np.sort(weights.random.permutation(vocab)[:num_ids])
        tensors["d2t"] = ids - np.arange(num_ids)
        tensors["t2d"] = np.isin(np.arange(vocab), ids)
    config = {**LAYER, "hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": num_layers}
    config["draft_vocab_size"] = num_ids
    return write(folder, {**config, "architectures": ["LlamaForCausalLMEagle3"], **keys}, tensors)


def mlp_speculator(
    folder: Path,
    seed: int = 0,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    n_predict: int = 4,
    tied: bool = True,
    scale_input: bool = True,
    inner: int = INNER,
) -> Path:
    """Write an MLP speculator."""
    weights = Weights(seed, hidden)
    for index in range(1 if tied else n_predict):
        weights.linear(f"speculator.emb.{index}", vocab, inner)
        weights.linear(f"speculator.head.{index}", vocab, inner)
        weights.norm(f"speculator.ln.{index}", inner)
        weights.tensors[f"speculator.ln.{index}.bias"] = weights.random.normal(0, 0.3, inner).astype(np.float32)
    for index in range(2 if tied else n_predict):
        weights.linear(f"speculator.proj.{index}", inner, inner if index else hidden)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": vocab,
        "emb_dim": hidden,
        "inner_dim": inner,
        "n_predict": n_predict,
        "tie_weights": tied,
        "scale_input": scale_input,
    }
    return write(folder, config, weights.tensors)


def medusa(
    folder: Path,
    seed: int = 0,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    num_heads: int = 4,
    num_blocks: int = 1,
    own_heads: bool = True,
    reduced: bool = False,
    converted: bool = False,
    has_bias: bool = True,
    prefix: str = "",
) -> Path:
    """Write Medusa's heads in their original form, or in vLLM's."""
    weights, num_ids = Weights(seed, hidden), DRAFT_VOCAB if reduced else vocab
    for head in range(num_heads):
        for block in range(num_blocks):
            name = f"blocks.{head}.layers.{block}" if converted else f"{prefix}{head}.{block}.linear"
            weights.linear(name, hidden, hidden, has_bias)
        if own_heads:
            name = f"lm_heads.{head}" if converted else f"{prefix}{head}.{num_blocks}"
            weights.linear(name, num_ids, hidden)
    tensors = weights.tensors
    if reduced:
        tensors["token_map"] = np.sort(weights.random.permutation(vocab)[:num_ids])
    if not converted:  # files say two heads whatever they hold
        return write(folder, {"medusa_num_heads": 2, "medusa_num_layers": num_blocks}, tensors)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_heads": num_heads,
        "num_hidden_layers": num_blocks,
        "medusa_fc_bias": has_bias,
        "original_lm_head": not own_heads,
        "truncated_vocab_size": num_ids,
    }
    return write(folder, config, tensors)
