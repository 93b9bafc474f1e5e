# SPDX-License-Identifier: Apache-2.0
"""The latent attention of a decoder layer: its tensors in a checkpoint, its weights, and the layer that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paddle import Tensor

from fastdeploy.config.latent_config import LatentConfig
from fastdeploy.layers.latent_attention import LatentAttention, LatentProjections, LatentScratch
from fastdeploy.layers.linear import Linear
from fastdeploy.models.attention_part import AttentionContext
from fastdeploy.models.expected_weights import ExpectedHeads
from fastdeploy.models.own_codes import packing_format
from fastdeploy.models.step_buffers import StepBuffers
from fastdeploy.models.weight_loader import LinearSpec, Shapes, StoredLinear, WeightLoader
from fastdeploy.ops.head_products import PackedHeads, pack_heads
from fastdeploy.ops.latent_attention import LatentLayout
from fastdeploy.ops.linear import PackedLinear, WeightPiece
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.quantized_form import FORMS


@dataclass(frozen=True)
class LatentNames:
    """Names of the tensors of one layer's attention; those of linear layers omit .weight and .bias."""

    norm: str
    query: str
    query_down: str
    query_norm: str
    query_up: str
    down: str
    latent_norm: str
    up: str
    output: str

    @classmethod
    def of_layer(cls, prefix: str) -> LatentNames:
        """Return the usual names in a layer whose names begin with `prefix`."""
        attention = f"{prefix}self_attn."
        return cls(
            norm=f"{prefix}input_layernorm.weight",
            query=f"{attention}q_proj",
            query_down=f"{attention}q_a_proj",
            query_norm=f"{attention}q_a_layernorm.weight",
            query_up=f"{attention}q_b_proj",
            down=f"{attention}kv_a_proj_with_mqa",
            latent_norm=f"{attention}kv_a_layernorm.weight",
            up=f"{attention}kv_b_proj",
            output=f"{attention}o_proj",
        )


@dataclass(frozen=True)
class LatentWeights:
    """Weights of one layer's latent attention, as `layers.latent_attention.LatentProjections` describes them.

    Attributes:
        num_heads: number of heads.
        config: the other sizes, the scale of the scores, and the eps of the norms within the layer.
        query_norm: of the queries' rank; None if they have none.
    """

    num_heads: int
    config: LatentConfig
    norm: Tensor
    down: PackedLinear
    query_norm: Tensor | None
    query: PackedLinear
    latent_norm: Tensor
    key_up: PackedHeads
    value_up: PackedHeads
    output: PackedLinear

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed layers."""
        packed = (self.down, self.query, self.key_up, self.value_up, self.output)
        return sum(part.num_bytes for part in packed)

    @property
    def key_exponents(self) -> None:
        """Return that keys are not balanced: a cache of latent rows in eight bits is not supported."""
        return None

    def make_layer(self, context: AttentionContext, buffers: StepBuffers, num_masked_prefix: int) -> LatentAttention:
        """Return the layer; `num_masked_prefix` leading positions are masked for every row but their own."""
        config, norm = self.config, NormParams(self.norm, context.eps)
        query_norm = norm if self.query_norm is None else NormParams(self.query_norm, config.norm_eps)
        projections = LatentProjections(
            down=Linear(self.down, norm),
            query=Linear(self.query, query_norm),
            has_query_rank=self.query_norm is not None,
            key_up=self.key_up,
            value_up=self.value_up,
            output=Linear(self.output),
        )
        return LatentAttention(
            projections,
            self._scratch(buffers),
            LatentLayout(self.num_heads, config.kv_lora_rank, config.nope_dim, config.rope_dim),
            config.scale,
            NormParams(self.latent_norm, config.norm_eps),
            context.cos_sin,
            context.interleaved_rotary,
            num_masked_prefix,
        )

    def _scratch(self, buffers: StepBuffers) -> LatentScratch:
        num_latents = self.num_heads * self.config.kv_lora_rank
        return LatentScratch(
            down=buffers.scratch("latent down", self.down.out_features),
            query=buffers.scratch("latent query", self.query.out_features),
            absorbed=buffers.scratch("absorbed queries", num_latents),
            attended=buffers.scratch("attended latents", num_latents),
            values=buffers.scratch("attended", self.output.in_features),
        )


@dataclass(frozen=True)
class LatentPart:
    """Latent attention, as a checkpoint stores it.

    Attributes:
        names: the names of its tensors.
        hidden_size: width of its input and output.
        num_heads: number of heads.
        config: the other sizes.
        has_bias: whether the projections from and to the hidden states have a bias, that of queries without a rank
            excepted.
    """

    names: LatentNames
    hidden_size: int
    num_heads: int
    config: LatentConfig
    has_bias: bool

    @property
    def down(self) -> LinearSpec:
        """Return the layer that makes the queries' rank, if there is one, and the latent row."""
        names, config = self.names, self.config
        row = StoredLinear(names.down, config.kv_lora_rank + config.rope_dim)
        rank = () if config.q_lora_rank is None else (StoredLinear(names.query_down, config.q_lora_rank),)
        return LinearSpec("latent_down", (*rank, row), self.hidden_size, self.has_bias)

    @property
    def query(self) -> LinearSpec:
        """Return the layer that makes the heads of queries."""
        config, rank = self.config, self.config.q_lora_rank
        name = self.names.query if rank is None else self.names.query_up
        width = self.num_heads * (config.nope_dim + config.rope_dim)
        return LinearSpec("query", (StoredLinear(name, width),), rank or self.hidden_size)

    @property
    def up(self) -> LinearSpec:
        """Return the layer whose two parts are absorbed: for each head, the rows of its keys, then of its values."""
        heads, config = self.num_heads, self.config
        stored = (StoredLinear(self.names.up, heads * (config.nope_dim + config.value_dim)),)
        keys, values = (heads * config.kv_lora_rank, config.nope_dim), (heads * config.value_dim, config.kv_lora_rank)
        return LinearSpec("latent_up", stored, config.kv_lora_rank, split=(keys, values))

    @property
    def output(self) -> LinearSpec:
        """Return the layer after the attention."""
        stored = (StoredLinear(self.names.output, self.hidden_size),)
        return LinearSpec("output", stored, self.num_heads * self.config.value_dim, self.has_bias)

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Return all linear layers."""
        return self.down, self.query, self.up, self.output

    @property
    def shapes(self) -> Shapes:
        """Return the name and shape of every tensor."""
        names, config = self.names, self.config
        shapes: Shapes = {names.norm: (self.hidden_size,), names.latent_norm: (config.kv_lora_rank,)}
        if config.q_lora_rank is not None:
            shapes[names.query_norm] = (config.q_lora_rank,)
        for spec in self.linears:
            shapes |= spec.shapes
        return shapes

    def load(self, loader: WeightLoader) -> LatentWeights:
        """Return the weights, in the weight format of attention."""
        names, config, quantization = self.names, self.config, loader.quantization.attention
        key_up, value_up = self._load_up(loader)
        return LatentWeights(
            num_heads=self.num_heads,
            config=config,
            norm=loader.copy(names.norm),
            down=loader.linear(self.down, quantization),
            query_norm=None if config.q_lora_rank is None else loader.copy(names.query_norm),
            query=loader.linear(self.query, quantization),
            latent_norm=loader.copy(names.latent_norm),
            key_up=key_up,
            value_up=value_up,
            output=loader.linear(self.output, quantization),
        )

    def _load_up(self, loader: WeightLoader) -> tuple[PackedHeads, PackedHeads]:
        """Return the parts of the up-projection that make keys and values.

        Codes of a checkpoint are widened: their groups lie along the latent row, but keys are summed over a head.
        """
        config, weights = self.config, _UpWeights(loader, self)
        name, format = f"{self.names.up}.weight", packing_format([None], loader.quantization.attention)
        form = FORMS.get(format)
        num_heads, rank, nope, value = self.num_heads, config.kv_lora_rank, config.nope_dim, config.value_dim
        keys = loader.store.keep(
            f"{self.names.up}.keys",
            lambda: pack_heads(weights.keys(), format),
            ExpectedHeads(num_heads, nope, rank, loader.dtype, form),
        )
        values = loader.store.keep(
            f"{self.names.up}.values",
            lambda: pack_heads(weights.values(), format),
            ExpectedHeads(num_heads, rank, value, loader.dtype, form),
        )
        weights.finish(name)
        return keys, values


class _UpWeights:
    """The up-projection of a layer, read when it is first asked for."""

    def __init__(self, loader: WeightLoader, part: LatentPart) -> None:
        self._loader, self._part = loader, part
        self._matrix: Tensor | None = None

    def keys(self) -> Sequence[Sequence[WeightPiece]]:
        """Return the part of each head that makes keys: nope_dim inputs, kv_lora_rank outputs."""
        config = self._part.config
        return [
            [WeightPiece(matrix[: config.nope_dim], 0, config.kv_lora_rank, is_transposed=True)]
            for matrix in self._matrices()
        ]

    def values(self) -> Sequence[Sequence[WeightPiece]]:
        """Return the part of each head that makes values: kv_lora_rank inputs, value_dim outputs."""
        config = self._part.config
        return [[WeightPiece(matrix[config.nope_dim :], 0, config.value_dim)] for matrix in self._matrices()]

    def finish(self, name: str) -> None:
        """Give back the memory of what was read."""
        if self._matrix is not None:
            self._loader.finish([name])

    def _matrices(self) -> Tensor:
        """Return [num_heads, nope_dim + value_dim, kv_lora_rank]."""
        part, config = self._part, self._part.config
        if self._matrix is None:
            self._matrix = self._loader.peek(f"{part.names.up}.weight")
        return self._matrix.reshape([part.num_heads, config.nope_dim + config.value_dim, config.kv_lora_rank])
