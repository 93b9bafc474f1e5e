# SPDX-License-Identifier: Apache-2.0
"""What distinguishes one dense architecture from another, as data."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from fastdeploy.config.model_config import ModelConfig


@dataclass(frozen=True)
class DecoderTraits:
    """Switches of the shared decoder.

    Attributes:
        qkv_bias, output_bias, mlp_bias: which linear layers have a bias.
        qk_norm: q and k heads are normalised before the rotation.
        interleaved_rotary: pairs are (0, 1), (2, 3), ... instead of (0, d/2), (1, d/2 + 1), ...
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    interleaved_rotary: bool = False


@dataclass(frozen=True)
class LayerNames:
    """Names of one layer's tensors in a checkpoint; linear layers without their .weight or .bias."""

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
        traits: reads the decoder's switches from a checkpoint's configuration.
        names: the checkpoint's tensor names.
        ignorable: substrings of tensor names that are left unread when present.
        paddle_prefix: what Paddle checkpoints put where others have `model`.
        has_grouped_qkv: a fused qkv of a Paddle checkpoint holds, for each key head, its queries, key and value; if
            not, all queries, all keys, all values (ERNIE, but where every query has its own key).
    """

    name: str
    traits: Callable[[ModelConfig], DecoderTraits]
    names: TensorNames = TensorNames()
    ignorable: tuple[str, ...] = ("rotary_emb.inv_freq",)
    paddle_prefix: str = "model"
    has_grouped_qkv: bool = True


def nextn_layers(names: Collection[str]) -> list[int]:
    """Return the numbers of the layers that are for multi-token prediction, in DeepSeek-V3's and GLM-4.5's form.

    They follow the decoder's layers; a projection of their own tells them apart.
    """
    found = (re.fullmatch(r"model\.layers\.(\d+)\.eh_proj\.weight", name) for name in names)
    return sorted(int(match[1]) for match in found if match)
