# SPDX-License-Identifier: Apache-2.0
"""The forms in which checkpoints hold layers for multi-token prediction, as data.

At position t + 1 the layer reads proj([emb_norm(embed(x_{t+1})) ; hidden_norm(h_t)]), where h_t is the target's state
after its final norm; one decoder layer follows; a norm and a head make the prediction of x_{t+2}. To draft further, the
layer's output takes the place of h_t. Where there are several layers, draft k is made by the k-th, which reads what
takes the place of h_t from the layer before it and the token one position further on (DeepSeek-V3 report, section 2.2);
the last one makes all further drafts.

- ERNIE 4.5 (`model.mtp_emb_norm.0`, ...): norm, head and embedding are the target's; the output after that norm takes
  the place of h_t.
- DeepSeek-V3 and GLM-4.5 (`model.layers.{number of layers}.enorm`, ...): norm, head and embedding are the layer's own,
  the latter two as far as the files hold them; the output before the norm takes the place of h_t.

The embedding comes first in the projection, as in the released checkpoints (the DeepSeek-V3 report writes the state
first); tests/models/test_mtp_training.py shows that a trained layer drafts well in this order only.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.models.architecture import DecoderTraits, LayerNames, TensorNames, nextn_layers
from fastdeploy.models.weights import Shapes, layer_shapes

FIELD = "speculative_config.model"
ERNIE_MARK = ".mtp_"  # in the name of every tensor of ERNIE's form, and of no other


@dataclass(frozen=True)
class MTPForm:
    """Names of the layer's tensors, and its rules.

    Attributes:
        emb_norm, hidden_norm, final_norm, embedding: tensors; "" stands for the target's own.
        projection, head: linear layers without their .weight or .bias; a head of "" is the target's.
        block: of the decoder layer.
        has_bias: the projection has one.
        recycles_normed: the output after the final norm stands for the next position's state, instead of before it.
        marks: regular expression that the name of every tensor of the layer matches, and of no other.
    """

    emb_norm: str
    hidden_norm: str
    projection: str
    block: LayerNames
    has_bias: bool
    recycles_normed: bool
    marks: str
    embedding: str = ""
    final_norm: str = ""
    head: str = ""

    def shapes(self, config: ModelConfig, traits: DecoderTraits) -> Shapes:
        """Return the name and shape of every tensor of the layer."""
        hidden, vocab = config.hidden_size, config.vocab_size
        shapes: Shapes = {name: (hidden,) for name in (self.emb_norm, self.hidden_norm, self.final_norm) if name}
        shapes[f"{self.projection}.weight"] = (hidden, 2 * hidden)
        if self.has_bias:
            shapes[f"{self.projection}.bias"] = (hidden,)
        if self.embedding:
            shapes[self.embedding] = (vocab, hidden)
        if self.head:
            shapes[f"{self.head}.weight"] = (vocab, hidden)
        return shapes | layer_shapes(config, traits, self.block)


def ernie_form(config: ModelConfig, index: int) -> MTPForm:
    """Return ERNIE 4.5's form, for the layer of this number."""
    return MTPForm(
        emb_norm=f"model.mtp_emb_norm.{index}.weight",
        hidden_norm=f"model.mtp_hidden_norm.{index}.weight",
        projection=f"model.mtp_linear_proj.{index}",
        block=TensorNames(layer_prefix="model.mtp_block.{index}.").layer(index),
        has_bias=config.use_bias,
        recycles_normed=True,
        marks=re.escape(ERNIE_MARK),
    )


def deepseek_form(index: int, names: Collection[str]) -> MTPForm:
    """Return the form that DeepSeek-V3 and GLM-4.5 share, for the layer of this number.

    Args:
        names: of the files' tensors: where embedding or head are not among them, they are the target's.
    """
    prefix = f"model.layers.{index}."
    embedding, head = f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head"
    return MTPForm(
        emb_norm=f"{prefix}enorm.weight",
        hidden_norm=f"{prefix}hnorm.weight",
        projection=f"{prefix}eh_proj",
        block=TensorNames().layer(index),
        has_bias=False,
        recycles_normed=False,
        marks=re.escape(prefix),
        embedding=embedding if embedding in names else "",
        final_norm=f"{prefix}shared_head.norm.weight",
        head=head if f"{head}.weight" in names else "",
    )


def find_forms(names: Collection[str], config: ModelConfig) -> list[MTPForm]:
    """Return the form of each layer among these tensors, in order; none if there is no layer."""
    if any(ERNIE_MARK in name for name in names):
        return [ernie_form(config, index) for index in range(max(1, len(ernie_layers(names))))]
    return [deepseek_form(index, names) for index in nextn_layers(names)]


def ernie_layers(names: Collection[str]) -> set[str]:
    """Return the numbers of the layers of ERNIE's form among these tensors."""
    return {match[1] for name in names if (match := re.search(r"\.mtp_block\.(\d+)\.", name))}
