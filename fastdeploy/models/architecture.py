# SPDX-License-Identifier: Apache-2.0
"""The differences between architectures, as data."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.models.attention_part import AttentionNames, AttentionPart
from fastdeploy.models.experts_part import ExpertsPart
from fastdeploy.models.latent_part import LatentNames, LatentPart
from fastdeploy.models.layer_parts import LayerParts
from fastdeploy.models.mlp_part import MLPPart
from fastdeploy.ops.rotary import HeadLayout


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
class TensorNames:
    """Names of a checkpoint's tensors."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head"
    layer_prefix: str = "model.layers.{index}."


@dataclass(frozen=True)
class Architecture:
    """A supported value of `architectures[0]`.

    Attributes:
        name: that value.
        traits: returns the decoder's options for a checkpoint's configuration.
        names: the checkpoint's tensor names.
        correction_bias: name of a router's bias for the choice, after the prefix of the block of experts.
        correction_bias_ndim: 1 for [num_experts], 2 for [1, num_experts].
        paddle_prefix: prefix of tensor names in Paddle checkpoints, where others have `model`.
        has_grouped_qkv: a fused qkv in a Paddle checkpoint holds the queries, key and value of one key head after the
            other. Otherwise it holds all queries, all keys, then all values, as ERNIE has it with grouped queries.
        has_nextn_layers: layers for multi-token prediction follow those of the decoder, in DeepSeek-V3's form.
    """

    name: str
    traits: Callable[[ModelConfig], DecoderTraits]
    names: TensorNames = TensorNames()
    paddle_prefix: str = "model"
    has_grouped_qkv: bool = True
    correction_bias: str = ""
    correction_bias_ndim: int = 1
    has_nextn_layers: bool = False

    def layer(self, config: ModelConfig, index: int) -> LayerParts:
        """Return the tensors of one layer of the decoder."""
        is_sparse = config.experts is not None and config.experts.sparse_layers[index]
        return self.block(config, self.names.layer_prefix.format(index=index), is_sparse)

    def block(self, config: ModelConfig, prefix: str, is_sparse: bool = False) -> LayerParts:
        """Return the tensors of a decoder layer.

        Args:
            prefix: what their names begin with.
            is_sparse: whether it has the model's experts instead of a dense block.
        """
        attention = self._attention(config, prefix)
        return LayerParts(attention, self._experts(config, prefix) if is_sparse else self._mlp(config, prefix))

    def _attention(self, config: ModelConfig, prefix: str) -> AttentionPart | LatentPart:
        traits = self.traits(config)
        if config.latent is not None:
            names = LatentNames.of_layer(prefix)
            return LatentPart(names, config.hidden_size, config.num_heads, config.latent, traits.output_bias)
        return AttentionPart(
            AttentionNames.of_layer(prefix),
            config.hidden_size,
            HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim),
            rotary_dim=config.rope.rotary_dim,
            interleaved_rotary=traits.interleaved_rotary,
            qkv_bias=traits.qkv_bias,
            output_bias=traits.output_bias,
            qk_norm=traits.qk_norm,
        )

    def _mlp(self, config: ModelConfig, prefix: str) -> MLPPart:
        has_bias, norm = self.traits(config).mlp_bias, f"{prefix}post_attention_layernorm.weight"
        return MLPPart(norm, f"{prefix}mlp.", config.hidden_size, config.intermediate_size, has_bias)

    def _experts(self, config: ModelConfig, prefix: str) -> ExpertsPart:
        assert config.experts is not None
        experts, norm = config.experts, f"{prefix}post_attention_layernorm.weight"
        bias = f"{prefix}mlp.{self.correction_bias}" if experts.has_correction_bias else ""
        shape = (*(1,) * (self.correction_bias_ndim - 1), experts.num_experts)
        return ExpertsPart(norm, f"{prefix}mlp.", config.hidden_size, experts, bias, shape)


def nextn_layers(names: Collection[str]) -> list[int]:
    """Return the indices of the layers for multi-token prediction in checkpoints like those of DeepSeek-V3 and GLM-4.5.

    They follow the decoder's layers and are recognised by their extra projection.
    """
    found = (re.fullmatch(r"model\.layers\.(\d{1,6})\.eh_proj\.weight", name) for name in names)
    return sorted(int(match[1]) for match in found if match)
