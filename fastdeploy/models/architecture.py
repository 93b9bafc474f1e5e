# SPDX-License-Identifier: Apache-2.0
"""The differences between dense architectures, as data."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from fastdeploy.config.model_config import ModelConfig


@dataclass(frozen=True)
class DecoderTraits:
    """Options of the shared decoder.

    Attributes:
        qkv_bias, output_bias, mlp_bias: whether these linear layers have a bias.
        qk_norm: whether q and k heads are normalised before the rotation.
        interleaved_rotary: rotated pairs are (0, 1), (2, 3), ... instead of (0, d/2), (1, d/2 + 1), ...
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    interleaved_rotary: bool = False


@dataclass(frozen=True)
class LayerNames:
    """Names of one layer's tensors in a checkpoint; those of linear layers omit .weight and .bias."""

    input_norm: str
    q: str
    k: str
    v: str
    output: str
    q_norm: str
    k_norm: str
    post_norm: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class TensorNames:
    """Names of a checkpoint's tensors."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head"
    layer_prefix: str = "model.layers.{index}."

    def layer(self, index: int) -> LayerNames:
        """Return the names of one layer's tensors."""
        prefix = self.layer_prefix.format(index=index)
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return LayerNames(
            input_norm=f"{prefix}input_layernorm.weight",
            q=f"{attention}q_proj",
            k=f"{attention}k_proj",
            v=f"{attention}v_proj",
            output=f"{attention}o_proj",
            q_norm=f"{attention}q_norm.weight",
            k_norm=f"{attention}k_norm.weight",
            post_norm=f"{prefix}post_attention_layernorm.weight",
            gate=f"{mlp}gate_proj",
            up=f"{mlp}up_proj",
            down=f"{mlp}down_proj",
        )


@dataclass(frozen=True)
class Architecture:
    """A supported value of `architectures[0]`.

    Attributes:
        name: that value.
        traits: returns the decoder's options for a checkpoint's configuration.
        names: the checkpoint's tensor names.
        ignorable: substrings of tensor names that need not be read.
        paddle_prefix: prefix of tensor names in Paddle checkpoints, where others have `model`.
        has_grouped_qkv: a fused qkv in a Paddle checkpoint holds the queries, key and value of one key head after the
            other. Otherwise it holds all queries, all keys, then all values, as ERNIE has it with grouped queries.
    """

    name: str
    traits: Callable[[ModelConfig], DecoderTraits]
    names: TensorNames = TensorNames()
    ignorable: tuple[str, ...] = ("rotary_emb.inv_freq",)
    paddle_prefix: str = "model"
    has_grouped_qkv: bool = True


def nextn_layers(names: Collection[str]) -> list[int]:
    """Return the indices of the layers for multi-token prediction in checkpoints like those of DeepSeek-V3 and GLM-4.5.

    They follow the decoder's layers and are recognised by their extra projection.
    """
    found = (re.fullmatch(r"model\.layers\.(\d+)\.eh_proj\.weight", name) for name in names)
    return sorted(int(match[1]) for match in found if match)
