# SPDX-License-Identifier: Apache-2.0
"""Where the tensors that a checkpoint in Hugging Face format would have lie in a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastdeploy.config.experts_config import ExpertsConfig
from fastdeploy.config.model_config import ModelConfig, parse_model_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.gguf.families import FAMILIES, Family
from fastdeploy.gguf.header import GGUFTensor, shown
from fastdeploy.gguf.metadata import FIELD
from fastdeploy.gguf.model_config import FREQ_FACTORS

Shape = tuple[int, ...]
_NUM_SHOWN = 24  # names in a message
_MLP = (("ffn_gate", "gate_proj"), ("ffn_up", "up_proj"), ("ffn_down", "down_proj"))


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies in a GGUF file.

    Attributes:
        name: of the tensor in the GGUF file.
        shape: of the tensor in the checkpoint, which may have leading dimensions of 1 that the file leaves out.
        expert: index in the first dimension of a tensor with all experts of a layer, or None.
        heads: number of heads whose rows lie in the order of interleaved pairs, [heads, half, 2], where the checkpoint
            has halves, [heads, 2, half]; None for rows in the checkpoint's order.
    """

    name: str
    shape: Shape
    expert: int | None = None
    heads: int | None = None


def tensor_names(config: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], where: str) -> dict[str, TensorPlace]:
    """Return the place of every tensor by its name in a checkpoint.

    Args:
        config: from `make_config_json` for the same file.
        tensors: of a `GGUFFile`.
        where: the file, as messages begin with it.

    Raises:
        ConfigError: tensors are missing, surplus, or of another shape than the metadata says; names them.
    """
    family = next(family for family in FAMILIES.values() if family.architecture == config["architectures"][0])
    names = _Names(family, parse_model_config(config, {}), tensors)
    places = dict(names.all(config.get("num_nextn_predict_layers", 0)))
    expected = {place.name: _stored_shape(place, names.experts) for place in places.values()}
    used = {*expected, FREQ_FACTORS} if family.has_freq_factors else set(expected)
    problems = {
        "missing": [name for name in expected if name not in tensors],
        "unexpected": [shown(name) for name in tensors if name not in used],
        "of wrong shape": [
            f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in tensors and _without_ones(tensors[name].shape) != _without_ones(shape)
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{len(found)} {kind} ({_listed(found)})" for kind, found in problems.items() if found)
        raise ConfigError(FIELD, f"{where}: tensors do not match the metadata: {listed}")
    return places


def _stored_shape(place: TensorPlace, experts: ExpertsConfig | None) -> Shape:
    if place.expert is None:
        return place.shape
    assert experts is not None
    return (experts.num_experts, *place.shape)


def _without_ones(shape: Shape) -> Shape:
    """Return a shape without leading dimensions of 1, which files have or not."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(names[:_NUM_SHOWN]) + more


@dataclass(frozen=True)
class _Names:
    """Yields the names of a model's tensors in a checkpoint, with their places."""

    family: Family
    config: ModelConfig
    tensors: Mapping[str, GGUFTensor]

    @property
    def experts(self) -> ExpertsConfig | None:
        return self.config.experts

    def all(self, num_nextn: int) -> Iterator[tuple[str, TensorPlace]]:
        """Yield every tensor; num_nextn layers for multi-token prediction follow the decoder's."""
        config = self.config
        matrix = (config.vocab_size, config.hidden_size)
        yield "model.embed_tokens.weight", TensorPlace("token_embd.weight", matrix)
        yield "model.norm.weight", TensorPlace("output_norm.weight", (config.hidden_size,))
        if not config.tie_word_embeddings:
            yield "lm_head.weight", TensorPlace("output.weight", matrix)
        for index in range(config.num_layers):
            is_sparse = self.experts is not None and self.experts.sparse_layers[index]
            yield from self._layer(index, is_sparse)
        for index in range(config.num_layers, config.num_layers + num_nextn):
            yield from self._layer(index, is_sparse=True)
            yield from self._nextn(index)

    def _layer(self, index: int, is_sparse: bool) -> Iterator[tuple[str, TensorPlace]]:
        hidden = self.config.hidden_size
        ours, theirs = f"model.layers.{index}.", f"blk.{index}."
        norms = (("input_layernorm", "attn_norm"), ("post_attention_layernorm", self.family.norm))
        for name, stored in norms:
            yield f"{ours}{name}.weight", TensorPlace(f"{theirs}{stored}.weight", (hidden,))
        yield from self._attention(f"{ours}self_attn.", theirs)
        if is_sparse:
            yield from self._experts(ours, theirs)
        else:
            yield from self._mlp(f"{ours}mlp.", theirs, self.config.intermediate_size, has_bias=self._has_mlp_bias)

    @property
    def _has_mlp_bias(self) -> bool:
        return bool(self.family.mlp_bias_flag) and bool(getattr(self.config, self.family.mlp_bias_flag))

    def _attention(self, ours: str, theirs: str) -> Iterator[tuple[str, TensorPlace]]:
        config, family = self.config, self.family
        queries, keys = config.num_heads, config.num_kv_heads
        has_bias = not family.bias_flag or bool(getattr(config, family.bias_flag))
        for part, heads in (("q", queries), ("k", keys), ("v", keys)):
            permuted = heads if family.has_permuted_heads and part != "v" else None
            shape = (heads * config.head_dim, config.hidden_size)
            yield from _linear(f"{ours}{part}_proj", f"{theirs}attn_{part}", shape, has_bias, heads=permuted)
        shape = (config.hidden_size, queries * config.head_dim)
        yield from _linear(f"{ours}o_proj", f"{theirs}attn_output", shape, has_bias and family.has_output_bias)
        if family.qk_norm == "always" or (family.qk_norm != "never" and getattr(config, family.qk_norm)):
            for part in ("q", "k"):
                place = TensorPlace(f"{theirs}attn_{part}_norm.weight", (config.head_dim,))
                yield f"{ours}{part}_norm.weight", place

    def _mlp(
        self, ours: str, theirs: str, width: int, suffix: str = "", expert: int | None = None, has_bias: bool = False
    ) -> Iterator[tuple[str, TensorPlace]]:
        """Yield the three layers of a feed-forward block; `suffix` follows their names in the file."""
        hidden = self.config.hidden_size
        for stored, name in _MLP:
            shape = (hidden, width) if name == "down_proj" else (width, hidden)
            yield from _linear(f"{ours}{name}", f"{theirs}{stored}{suffix}", shape, has_bias, expert)

    def _experts(self, ours: str, theirs: str) -> Iterator[tuple[str, TensorPlace]]:
        experts, hidden = self.experts, self.config.hidden_size
        assert experts is not None
        router = TensorPlace(f"{theirs}ffn_gate_inp.weight", (experts.num_experts, hidden))
        yield f"{ours}mlp.gate.weight", router
        if experts.has_correction_bias:
            ones = (1,) if "moe_statics" in self.family.correction_bias else ()
            place = TensorPlace(f"{theirs}exp_probs_b.bias", (*ones, experts.num_experts))
            yield ours + self.family.correction_bias, place
        for expert in range(experts.num_experts):
            yield from self._mlp(f"{ours}mlp.experts.{expert}.", theirs, experts.width, "_exps", expert)
        if experts.shared_width:
            yield from self._mlp(f"{ours}mlp.shared_experts.", theirs, experts.shared_width, "_shexp")

    def _nextn(self, index: int) -> Iterator[tuple[str, TensorPlace]]:
        """Yield what a layer for multi-token prediction has besides its decoder layer.

        Without an embedding or a head of its own it uses the model's; without a norm of its own, too, for which the
        checkpoint always has a name.
        """
        hidden, vocab = self.config.hidden_size, self.config.vocab_size
        ours, theirs = f"model.layers.{index}.", f"blk.{index}.nextn."
        yield f"{ours}eh_proj.weight", TensorPlace(f"{theirs}eh_proj.weight", (hidden, 2 * hidden))
        for name in ("enorm", "hnorm"):
            yield f"{ours}{name}.weight", TensorPlace(f"{theirs}{name}.weight", (hidden,))
        norm = f"{theirs}shared_head_norm.weight"
        place = TensorPlace(norm if norm in self.tensors else "output_norm.weight", (hidden,))
        yield f"{ours}shared_head.norm.weight", place
        for name, stored in (("embed_tokens", "embed_tokens"), ("shared_head.head", "shared_head_head")):
            if f"{theirs}{stored}.weight" in self.tensors:
                yield f"{ours}{name}.weight", TensorPlace(f"{theirs}{stored}.weight", (vocab, hidden))


def _linear(
    ours: str, theirs: str, shape: Shape, has_bias: bool, expert: int | None = None, heads: int | None = None
) -> Iterator[tuple[str, TensorPlace]]:
    yield f"{ours}.weight", TensorPlace(f"{theirs}.weight", shape, expert, heads)
    if has_bias:
        yield f"{ours}.bias", TensorPlace(f"{theirs}.bias", shape[:1], expert, heads)
