# SPDX-License-Identifier: Apache-2.0
"""A layer for multi-token prediction in ERNIE 4.5's form.

At position t + 1 it reads proj([emb_norm(embed(x_{t+1})) ; hidden_norm(h_t)]), where h_t is the target's state after
its final norm; one decoder layer follows; the target's final norm and head make the prediction of x_{t+2}. The normed
output takes the place of h_t when the layer drafts further. Position 0 has no state before it and is seen by nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import paddle
from paddle import Tensor

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.layers.linear import Linear
from fastdeploy.models.architecture import Architecture, DecoderTraits, TensorNames
from fastdeploy.models.decoder import CausalLM, DecoderLayer, StepBuffers, full_step
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weight_source import DummySource, SafetensorsSource, WeightSource
from fastdeploy.models.weights import (
    LayerWeights,
    Shapes,
    WeightLoader,
    check_quantization,
    check_shapes,
    expected_shapes,
    layer_shapes,
)
from fastdeploy.ops.attention import KVCache, RowIndex
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.linear import PackedLinear, pack_linear
from fastdeploy.ops.norm import NormRule
from fastdeploy.ops.recording import Recording, can_record

EMB_NORM = "model.mtp_emb_norm.0.weight"
HIDDEN_NORM = "model.mtp_hidden_norm.0.weight"
PROJECTION = "model.mtp_linear_proj.0"
BLOCK_NAMES = TensorNames(layer_prefix="model.mtp_block.{index}.").layer(0)
MARK = ".mtp_"  # in the name of every tensor of the layer, and of no other
FIELD = "speculative_config.model"


@dataclass(frozen=True)
class MTPWeights:
    """The layer's own weights; the projection is split into the halves that read the embedding and the state."""

    emb_norm: Tensor
    hidden_norm: Tensor
    emb_projection: PackedLinear
    hidden_projection: PackedLinear
    block: LayerWeights


class MTPLayer:
    """The layer, bound to the parts that it shares with its target and to buffers of its own.

    Attributes:
        source: [max_rows, hidden_size], the state that each row reads; written by the caller of `forward`.
        max_rows: most rows of a call.
    """

    def __init__(self, config: ModelConfig, weights: MTPWeights, target: CausalLM) -> None:
        """Allocate buffers for as many rows as the target takes."""
        shared, eps = target.shared, config.rms_norm_eps
        self.max_rows = target.max_rows
        self._buffers = StepBuffers(config, target.max_rows)
        self.source: Tensor = paddle.zeros([target.max_rows, config.hidden_size], config.dtype)
        self._embedding, self._final_norm, self._head = shared.embedding, shared.final_norm, shared.head
        self._emb_projection = Linear(weights.emb_projection, NormRule(weights.emb_norm, eps))
        self._hidden_projection = Linear(weights.hidden_projection, NormRule(weights.hidden_norm, eps))
        self._block = DecoderLayer(
            config, shared.traits, weights.block, shared.heads, shared.cos_sin, self._buffers, hides_first=True
        )
        self._recording: Recording | None = None

    def forward(self, token_ids: Tensor, batch: BatchIndex, cache: KVCache) -> Tensor:
        """Write keys and values of the batch's rows and return their output after the target's final norm.

        The launches are recorded at the first call: every call passes the same objects.

        Args:
            token_ids: [max_rows] int32, the token at each row's position; `source` holds the state before it.
            batch: the rows, at most max_rows.
            cache: of this layer.

        Returns:
            [max_rows, hidden_size]; the first batch.num_rows rows are valid until the next call.
        """
        out = self._buffers.normed
        if not can_record():
            self._call_operators(token_ids, batch, cache, batch.num_rows)
            return out
        if self._recording is None:
            full = full_step(batch, self.max_rows)
            self._recording = Recording(lambda: self._call_operators(token_ids, full, cache, self.max_rows))
        self._recording.replay(out, batch.num_rows, batch.num_seqs)
        return out

    def compute_logits(self, hidden: Tensor, num_rows: int, out: Tensor) -> None:
        """Write the logits of the first num_rows rows of hidden into out [capacity, vocab_size] float32."""
        self._head(hidden, out, num_rows)

    def _call_operators(self, token_ids: Tensor, batch: RowIndex, cache: KVCache, num_rows: int) -> None:
        hidden, normed = self._buffers.hidden, self._buffers.normed
        self._embedding(token_ids, normed, num_rows)
        self._emb_projection(normed, hidden, num_rows)
        self._hidden_projection(self.source, hidden, num_rows, hidden)
        self._block(batch, cache, num_rows)
        self._final_norm(hidden, normed, num_rows)


def load_mtp_layer(
    config: ModelConfig, target: CausalLM, path: str | None, load_choices: str, quantization: QuantizationConfig
) -> MTPLayer:
    """Read the layer that belongs to `target`.

    Args:
        config: of the target.
        path: folder of the layer's tensors; None where they lie in the target's checkpoint.
        load_choices: `default_v1` reads the files, `dummy` draws weights of the same shapes.
        quantization: the format of the layer's attention and feed-forward weights; the projection keeps its type, and
            the head is the target's.

    Raises:
        ConfigError: no such layer, several of them, tensors that do not match, or quantization of another dtype than
            bfloat16.
    """
    check_quantization(config, quantization)
    architecture = find_architecture(config)
    shapes = mtp_shapes(config, architecture.traits(config))
    source: WeightSource
    if load_choices == "dummy":
        source = DummySource(shapes, seed=0)
    else:
        source = MTPSource(Path(path or config.path), config, architecture, shapes)
    loader = WeightLoader(config, architecture, source, shapes, None, quantization)
    return MTPLayer(config, _load(loader, config), target)


def holds_mtp_layer(folder: str) -> bool:
    """Return whether the checkpoint in `folder` has tensors of such a layer, readable or not."""
    return any(MARK in name for name in SafetensorsSource(Path(folder)).shapes)


def mtp_shapes(config: ModelConfig, traits: DecoderTraits) -> Shapes:
    """Return the name and shape of every tensor of the layer."""
    hidden = config.hidden_size
    shapes: Shapes = {EMB_NORM: (hidden,), HIDDEN_NORM: (hidden,), f"{PROJECTION}.weight": (hidden, 2 * hidden)}
    if config.use_bias:
        shapes[f"{PROJECTION}.bias"] = (hidden,)
    return shapes | layer_shapes(config, traits, BLOCK_NAMES)


def _load(loader: WeightLoader, config: ModelConfig) -> MTPWeights:
    hidden = config.hidden_size
    projection = loader.owned(f"{PROJECTION}.weight")
    bias = loader.owned(f"{PROJECTION}.bias") if config.use_bias else None
    return MTPWeights(
        emb_norm=loader.owned(EMB_NORM),
        hidden_norm=loader.owned(HIDDEN_NORM),
        emb_projection=pack_linear(projection[:, :hidden].contiguous(), bias),
        hidden_projection=pack_linear(projection[:, hidden:].contiguous()),
        block=loader.layer(BLOCK_NAMES),
    )


class MTPSource:
    """The layer's tensors under the names and in the shapes of torch layout, wherever and however the files hold them.

    The projection is not square: its shape says whether linear layers are stored [out, in] or, as Paddle does,
    [in, out].
    """

    def __init__(self, folder: Path, config: ModelConfig, architecture: Architecture, shapes: Shapes) -> None:
        """Open the files and compare names and shapes.

        Raises:
            ConfigError: no layer there, several, or tensors that are missing, surplus or misshapen, by name.
        """
        self._files = SafetensorsSource(folder)
        self._shapes = shapes
        prefix = architecture.paddle_prefix
        self._names = {
            f"model{name.removeprefix(prefix)}" if name.startswith(f"{prefix}.") else name: name
            for name in self._files.shapes
        }
        found = self._found(expected_shapes(config, architecture))
        if not any(MARK in name for name in found):
            raise ConfigError(FIELD, f"{folder} holds no layer for multi-token prediction (model{MARK}...)")
        if any(name.startswith("model.mtp_block.1.") for name in found):
            raise ConfigError(FIELD, f"{folder} holds several layers for multi-token prediction, expected one")
        hidden = config.hidden_size
        self._is_transposed = found.get(f"{PROJECTION}.weight") == (2 * hidden, hidden)
        layout = "Paddle layout" if self._is_transposed else "torch layout"
        expected = {name: shape[::-1] for name, shape in shapes.items()} if self._is_transposed else shapes
        strict = replace(architecture, ignorable=("rotary_emb.inv_freq",))
        check_shapes(found, expected, replace(config, path=str(folder)), strict, layout)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes that the layer expects."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU in the type it is stored in."""
        tensor = self._files.read(self._names[name])
        return tensor.t().contiguous() if self._is_transposed and len(self._shapes[name]) == 2 else tensor

    def _found(self, of_target: Shapes) -> dict[str, tuple[int, ...]]:
        """Return the files' tensors without the target's own, which lie beside the layer's."""
        shapes = self._files.shapes
        return {
            name: shapes[stored]
            for name, stored in self._names.items()
            if MARK in name or (name not in of_target and not _is_of_decoder(name))
        }


def _is_of_decoder(name: str) -> bool:
    """Return whether the target's loader answers for the tensor, fused layers among them."""
    return name.startswith(("model.layers.", "lm_head."))
