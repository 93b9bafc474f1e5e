# SPDX-License-Identifier: Apache-2.0
"""Loads heads of EAGLE's kinds."""

from __future__ import annotations

import logging
from pathlib import Path

import paddle

from fastdeploy.config.head_config import HeadConfig, read_head_config
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.models.attention_part import AttentionNames, AttentionPart
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.heads.eagle import EagleHead, EagleWeights, FirstLayerWeights, JointWeights
from fastdeploy.models.heads.taps import TapWeights
from fastdeploy.models.heads.tensors import check_head_tensors, expected_shapes, open_head, target_ids
from fastdeploy.models.layer_parts import LayerParts
from fastdeploy.models.loader import load_head, open_source
from fastdeploy.models.mlp_part import MLPPart
from fastdeploy.models.mtp import needs_head
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.repeated_tables import are_equal, digest_of
from fastdeploy.models.weight_loader import LinearSpec, StoredLinear, WeightLoader
from fastdeploy.models.weight_source import DummySource, HeadFiles, WeightSource
from fastdeploy.models.weights import check_quantization
from fastdeploy.ops.linear import PackedLinear, pack_linear
from fastdeploy.ops.registry import selected_backend
from fastdeploy.ops.rotary import HeadLayout

EMBEDDING = "embed_tokens.weight"

logger = logging.getLogger("fastdeploy.engine")


def find_head(folder: str, method: str, target: ModelConfig) -> HeadConfig:
    """Read the configuration of a head, and compare it with the target and with its tensors, of which ids are read.

    Raises:
        ConfigError: the head was made for another target, or a key, a tensor or an id is not valid.
    """
    with selected_backend().on_host():
        files = open_head(Path(folder))
        config = read_head_config(Path(folder), method, target, files.shapes)
        check_head_tensors(files, config)
        target_ids(files, config)
    return config


def load_eagle_head(
    config: HeadConfig, target: CausalLM, quantization: QuantizationConfig, load_choices: str
) -> EagleHead:
    """Load a head that `find_head` has checked.

    Args:
        quantization: weight formats of its layers and of its head; projections of states have that of attention.
        load_choices: `default_v1` reads the files, `dummy` generates random weights.

    Raises:
        ConfigError: a dtype other than bfloat16 is quantized, or a file has changed.
    """
    check_quantization(config.model, quantization)
    with selected_backend().on_host():
        files = open_head(Path(config.model.path))
        ids = target_ids(files, config)
        shapes = expected_shapes(config)
        source: WeightSource = DummySource(shapes, seed=0) if load_choices == "dummy" else files
        loader = WeightLoader(config.model.dtype, source, shapes, None, quantization)
        has_embedding = config.has_embedding and (load_choices == "dummy" or not _repeats_embedding(files, target))
        weights = EagleWeights(
            embedding=loader.table(EMBEDDING, quantization.attention) if has_embedding else None,
            first=_first_layer(loader, config),
            others=tuple(_layer(config, index).load(loader) for index in range(1, config.model.num_layers)),
            final_norm=loader.copy("norm.weight") if "norm.weight" in shapes else None,
            head=_own_head(loader, config) if config.has_head else head_for_drafts(target, load_choices, quantization),
            taps=_taps(loader, config),
        )
    return EagleHead(config, weights, target, ids)


def _repeats_embedding(files: HeadFiles, target: CausalLM) -> bool:
    """Return whether the head's embedding has the values of the target's, which is then used instead."""
    config = target.config
    own = files.read(EMBEDDING)
    if config.packed is not None:
        is_equal = digest_of(own, config.dtype) == config.packed.embedding
    else:
        architecture = find_architecture(config)
        name = architecture.names.embedding
        source, _ = open_source(config, architecture, "default_v1", seed=0)
        is_equal = source.form(name) is None and are_equal(own, source.read(name), config.dtype)
    if not is_equal:
        num_bytes = int(own.size) * (2 if config.dtype == "bfloat16" else 4)
        logger.info("the head's embedding is not the target's, and takes %.0f MiB", num_bytes / 2**20)
    return is_equal


def _first_layer(loader: WeightLoader, config: HeadConfig) -> FirstLayerWeights:
    attention, formats = _attention(config, 0), loader.quantization
    is_eagle3, names = config.is_eagle3, attention.names
    hidden = config.model.hidden_size
    if is_eagle3:
        joint = _halves(loader, attention.qkv.stored, hidden, config.has_qkv_bias)
        norms = loader.copy(names.norm), loader.copy("layers.0.hidden_norm.weight")
    else:
        joint, norms = _halves(loader, (StoredLinear("fc", hidden),), hidden, config.has_fc_bias), (None, None)
    return FirstLayerWeights(
        joint=JointWeights(*joint, *norms),
        qkv=None if is_eagle3 else loader.linear(attention.qkv, formats.attention),
        output=loader.linear(attention.output, formats.attention),
        q_norm=loader.copy(names.q_norm) if config.has_qk_norm else None,
        k_norm=loader.copy(names.k_norm) if config.has_qk_norm else None,
        mlp=_mlp(config, 0).load(loader),
    )


def _layer(config: HeadConfig, index: int) -> LayerParts:
    """Return a decoder layer that reads a state alone."""
    return LayerParts(_attention(config, index), _mlp(config, index))


def _mlp(config: HeadConfig, index: int) -> MLPPart:
    model, prefix = config.model, f"layers.{index}."
    norm, sizes = f"{prefix}post_attention_layernorm.weight", (model.hidden_size, model.intermediate_size)
    return MLPPart(norm, f"{prefix}mlp.", *sizes, config.has_mlp_bias)


def _attention(config: HeadConfig, index: int) -> AttentionPart:
    model = config.model
    return AttentionPart(
        AttentionNames.of_layer(f"layers.{index}."),
        model.hidden_size,
        HeadLayout(model.num_heads, model.num_kv_heads, model.head_dim),
        rotary_dim=model.rope.rotary_dim,
        interleaved_rotary=False,
        qkv_bias=config.has_qkv_bias,
        output_bias=config.has_output_bias,
        qk_norm=config.has_qk_norm,
    )


def _halves(
    loader: WeightLoader, stored: tuple[StoredLinear, ...], width: int, has_bias: bool
) -> tuple[PackedLinear, PackedLinear]:
    """Split linear layers that read [embedding ; state]; the bias is added to what reads the embedding."""
    bias = paddle.concat([loader.read(f"{one.name}.bias") for one in stored]) if has_bias else None
    quantization = loader.quantization.attention
    weights = [loader.source.read(f"{one.name}.weight").astype(loader.dtype) for one in stored]
    halves = [paddle.concat([w[:, i * width : (i + 1) * width] for w in weights]) for i in range(2)]
    packed = pack_linear(halves[0], bias, quantization), pack_linear(halves[1], None, quantization)
    loader.finish([f"{one.name}.weight" for one in stored])
    return packed


def _taps(loader: WeightLoader, config: HeadConfig) -> tuple[TapWeights, ...]:
    if not config.taps:
        return ()
    width, quantization = config.target_width, loader.quantization.attention
    bias = loader.read("fc.bias") if config.has_fc_bias else None
    weight = loader.source.read("fc.weight").astype(loader.dtype)
    first = min(range(len(config.taps)), key=lambda i: config.taps[i])
    taps = tuple(
        TapWeights(
            layer,
            pack_linear(
                weight[:, i * width : (i + 1) * width].contiguous(), bias if i == first else None, quantization
            ),
            loader.copy(f"fc_norm.{i}.weight") if config.has_fc_norms else None,
        )
        for i, layer in enumerate(config.taps)
    )
    loader.finish(["fc.weight"])
    return taps


def _own_head(loader: WeightLoader, config: HeadConfig) -> PackedLinear:
    stored = (StoredLinear("lm_head", config.draft_vocab_size),)
    return loader.linear(LinearSpec("head", stored, config.model.hidden_size), loader.quantization.head)


def head_for_drafts(target: CausalLM, load_choices: str, quantization: QuantizationConfig) -> PackedLinear | None:
    """Return a copy of the target's head in the format of heads for drafts; None if the target's own is used.

    A packed target has no head in another format.
    """
    is_packed = target.config.packed is not None and load_choices == "default_v1"
    if is_packed or not needs_head(target.config, load_choices, quantization.head, target.shared.head.weight):
        return None
    return load_head(target.config, load_choices, quantization.head)
