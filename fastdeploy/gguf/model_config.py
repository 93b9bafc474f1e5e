# SPDX-License-Identifier: Apache-2.0
"""config.json and generation_config.json of a model in a GGUF file, as transformers would write them.

Sources: llama.cpp's conversion/*.py (what it stores of a config.json) and src/models/*.cpp (what it computes). Sizes
that tensors show are taken from these, and metadata that says something else is refused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from fastdeploy.config.generation_defaults import parse_generation_defaults
from fastdeploy.config.model_config import parse_model_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.gguf.families import FAMILIES, Family
from fastdeploy.gguf.header import GGUFTensor
from fastdeploy.gguf.metadata import ARCHITECTURE, FIELD, SAMPLING_KEYS, ArchitectureKeys, shortest

Tensors = Mapping[str, GGUFTensor]
FREQ_FACTORS = "rope_freqs.weight"
_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func
_MAX_TOKEN_ID = 2**31 - 1
_MAX_LAYERS = 2**12


def make_config_json(metadata: Mapping[str, Any], tensors: Tensors, where: str) -> dict[str, Any]:
    """Return what config.json says of a model.

    Args:
        metadata, tensors: of a `GGUFFile`.
        where: the file, as messages begin with it.

    Raises:
        ConfigError: the architecture is not supported, a key is missing, not valid, unknown, or changes results in a
            way that is not supported, or metadata contradicts a tensor. Names the key.
    """
    keys = ArchitectureKeys(metadata, where)
    family = _find_family(keys)
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": _vocab_size(metadata, keys, tensors),
        **_sizes(keys, family, tensors),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        **_flags(family, tensors),
        **_token_ids(metadata, keys),
    }
    config["rope_parameters"] = _rope(keys, family, tensors, config["head_dim"])
    config |= _window(keys, family, config["max_position_embeddings"])
    if family.experts:
        config |= _EXPERTS[family.experts](keys, tensors, config["num_hidden_layers"])
    keys.refuse_unused()
    _check(config, where)
    return config


def _find_family(keys: ArchitectureKeys) -> Family:
    name, supported = keys.architecture, ", ".join(FAMILIES)
    if name not in FAMILIES:
        raise keys.error(ARCHITECTURE, f"{name!r:.80} is not supported (supported: {supported})")
    if name == "llama" and keys.size("expert_count", 0, low=0):
        raise keys.refuse("expert_count", f"Llama with experts (Mixtral) is not supported (supported: {supported})")
    return FAMILIES[name]


def _check(config: Mapping[str, Any], where: str) -> None:
    """Refuse values that `ModelConfig` refuses, in a message that names the file instead of config.json."""
    try:
        parse_model_config(config, {})
    except ConfigError as error:
        raise ConfigError(FIELD, f"{where}: {error}") from None


def _sizes(keys: ArchitectureKeys, family: Family, tensors: Tensors) -> dict[str, Any]:
    hidden_size, num_heads = keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", max(1, hidden_size // num_heads))
    keys.expect("attention.value_length", head_dim, "the size of keys")
    keys.expect("embedding_length_out", hidden_size, "embedding_length")
    num_kv_heads = keys.size("attention.head_count_kv", num_heads)
    intermediate_size = keys.size("feed_forward_length")
    _check_rows(keys, tensors, "attention.head_count", num_heads * head_dim, "blk.0.attn_q.weight")
    _check_rows(keys, tensors, "attention.head_count_kv", num_kv_heads * head_dim, "blk.0.attn_k.weight")
    _check_rows(keys, tensors, "feed_forward_length", intermediate_size, "blk.0.ffn_gate.weight")
    num_layers, num_nextn = keys.size("block_count", high=_MAX_LAYERS), 0
    if family.has_nextn_layers:
        num_nextn = keys.size("nextn_predict_layers", 0, low=0)
        num_layers -= num_nextn
        if num_layers < 1:
            raise keys.refuse("nextn_predict_layers", f"{num_nextn} of {num_layers + num_nextn} blocks")
        if not any(name.startswith(f"blk.{num_layers}.") for name in tensors):
            num_nextn = 0  # the layers for multi-token prediction were left out
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.size("context_length"),
        **({"num_nextn_predict_layers": num_nextn} if family.has_nextn_layers else {}),
    }


def _check_rows(keys: ArchitectureKeys, tensors: Tensors, key: str, num_rows: int, name: str) -> None:
    """Refuse a size with which a tensor of the first layer has another number of rows; a missing one is said later."""
    if name in tensors and tensors[name].shape[0] != num_rows:
        raise keys.refuse(key, f"{name} has {tensors[name].shape[0]} rows, expected {num_rows}")


def _vocab_size(metadata: Mapping[str, Any], keys: ArchitectureKeys, tensors: Tensors) -> int:
    """Return the rows of the embedding, of which the tokenizer may use only the first ones."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(FIELD, f"{keys.where}: has no matrix token_embd.weight")
    num_rows, num_columns = embedding.shape
    keys.expect("vocab_size", num_rows, "token_embd.weight")
    keys.expect("embedding_length", num_columns, "token_embd.weight")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or len(tokens) > num_rows:
        found = f"{len(tokens)} tokens" if isinstance(tokens, list) else f"{tokens!r:.80}"
        raise keys.error("tokenizer.ggml.tokens", f"expected at most the {num_rows} of token_embd.weight, got {found}")
    return num_rows


def _flags(family: Family, tensors: Tensors) -> dict[str, bool]:
    """Return the switches of config.json for tensors that a model may have or not."""
    found = {family.mlp_bias_flag: "blk.0.ffn_gate.bias" in tensors}
    found[family.bias_flag] = "blk.0.attn_q.bias" in tensors
    if family.qk_norm not in ("always", "never"):
        found[family.qk_norm] = "blk.0.attn_q_norm.weight" in tensors
    return {key: value for key, value in found.items() if key}


def _token_ids(metadata: Mapping[str, Any], keys: ArchitectureKeys) -> dict[str, int]:
    found = {}
    for name in ("bos_token_id", "eos_token_id"):
        value = metadata.get(key := f"tokenizer.ggml.{name}")
        if value is None:
            continue
        if type(value) is not int or not 0 <= value <= _MAX_TOKEN_ID:
            raise keys.error(key, f"expected a token id, got {value!r:.80}")
        found[name] = value
    return found


def _rope(keys: ArchitectureKeys, family: Family, tensors: Tensors, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of transformers 5."""
    params: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 10000.0)}
    rotary_dim = keys.size("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or (rotary_dim < head_dim and not family.has_partial_rotary):
        raise keys.refuse("rope.dimension_count", f"expected the size of a head, {head_dim}, got {rotary_dim}")
    if family.has_partial_rotary:
        params["partial_rotary_factor"] = _fraction(rotary_dim, head_dim)
    params |= _rope_scaling(keys)
    if family.has_freq_factors and FREQ_FACTORS in tensors:
        if params["rope_type"] != "default":
            raise ConfigError(
                FIELD, f"{keys.where}: {FREQ_FACTORS} beside rope.scaling.type {params['rope_type']} is not supported"
            )
        factors = _read_factors(tensors[FREQ_FACTORS], rotary_dim // 2, keys.where)
        params |= {"rope_type": "freq_factors", "freq_factors": factors}
    return params


def _fraction(part: int, whole: int) -> float:
    """Return part / whole so that int(whole * fraction) is the part again."""
    fraction = part / whole
    return fraction if int(whole * fraction) == part else math.nextafter(fraction, math.inf)


def _rope_scaling(keys: ArchitectureKeys) -> dict[str, Any]:
    """Return the scaling; a factor without a type is linear, and a factor of 0 or 1 does nothing."""
    kind = keys.get("rope.scaling.type")
    older = keys.number("rope.scale_linear", 0.0)
    factor = keys.number("rope.scaling.factor", 0.0) or older
    if kind not in (None, "none", "linear", "yarn"):
        raise keys.refuse("rope.scaling.type", f"{kind!r:.80} is not supported (supported: none, linear, yarn)")
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    if kind != "yarn":
        return {"rope_type": "linear", "factor": factor}
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise keys.refuse("rope.scaling.yarn_ext_factor", "only 1 is supported")
    params = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.size(
            "rope.scaling.original_context_length", keys.size("context_length")
        ),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if keys.get("rope.scaling.yarn_attn_factor") is not None:
        params["attention_factor"] = keys.number("rope.scaling.yarn_attn_factor")
    return params


def _read_factors(tensor: GGUFTensor, count: int, where: str) -> list[float]:
    """Read the factor of each frequency."""
    if tensor.kind.name != "F32" or tensor.shape != (count,):
        found = f"{tensor.kind.name} {list(tensor.shape)}"
        raise ConfigError(FIELD, f"{where}: tensor {tensor.name}: expected F32 {[count]}, got {found}")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        factors = struct.unpack(f"<{count}f", stream.read(4 * count))
    if bad := [factor for factor in factors if not 1e-6 <= factor <= 1e6]:
        raise ConfigError(FIELD, f"{where}: tensor {tensor.name}: expected numbers in [1e-06, 1000000.0], got {bad[0]}")
    return list(factors)


def _window(keys: ArchitectureKeys, family: Family, context: int) -> dict[str, Any]:
    """Return the sliding window of all layers, if it is shorter than the context."""
    window = keys.size("attention.sliding_window", 0, low=0)
    if not 0 < window < context:
        return {}
    if not family.has_sliding_window:
        raise keys.refuse("attention.sliding_window", f"{family.architecture} has no sliding windows, got {window}")
    return {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}


def _sparse_layers(keys: ArchitectureKeys, tensors: Tensors, num_layers: int) -> list[int]:
    """Return the layers that have a router."""
    layers = [index for index in range(num_layers) if f"blk.{index}.ffn_gate_inp.weight" in tensors]
    if not layers:
        raise ConfigError(FIELD, f"{keys.where}: has no tensor blk.*.ffn_gate_inp.weight, although it has experts")
    return layers


def _width(keys: ArchitectureKeys, tensors: Tensors, sparse_layers: list[int]) -> int:
    """Return the neurons of an expert, which the first tensor of experts shows."""
    name = f"blk.{sparse_layers[0]}.ffn_gate_exps.weight"
    if name not in tensors or len(tensors[name].shape) != 3:
        raise ConfigError(FIELD, f"{keys.where}: has no tensor {name} with three dimensions, although it has experts")
    num_experts, width, _ = tensors[name].shape
    keys.expect("expert_count", num_experts, name)
    keys.expect("expert_feed_forward_length", width, name)
    return width


def _num_shared(keys: ArchitectureKeys, tensors: Tensors, sparse_layers: list[int], width: int) -> int:
    """Return the shared experts, which are stored as one of their common width."""
    name = f"blk.{sparse_layers[0]}.ffn_gate_shexp.weight"
    num_rows = tensors[name].shape[0] if name in tensors else 0
    keys.expect("expert_shared_feed_forward_length", num_rows, name)
    count = keys.size("expert_shared_count", num_rows // width, low=0)
    if count * width != num_rows:
        raise keys.refuse("expert_shared_count", f"{count} of {width} neurons, but {name} has {num_rows} rows")
    return count


def _check_gating(keys: ArchitectureKeys, expected: int) -> None:
    if (found := keys.size("expert_gating_func", 0, low=0)) not in (0, expected):
        raise keys.refuse("expert_gating_func", f"only {expected} is supported, got {found}")


def _qwen3_experts(keys: ArchitectureKeys, tensors: Tensors, num_layers: int) -> dict[str, Any]:
    _check_gating(keys, _SOFTMAX)
    sparse = _sparse_layers(keys, tensors, num_layers)
    return {
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": _width(keys, tensors, sparse),
        "norm_topk_prob": keys.switch("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index in range(num_layers) if index not in sparse],
    }


def _ernie_experts(keys: ArchitectureKeys, tensors: Tensors, num_layers: int) -> dict[str, Any]:
    _check_gating(keys, _SOFTMAX)
    if not keys.switch("expert_weights_norm", True):
        raise keys.refuse("expert_weights_norm", "only True is supported")
    sparse = _sparse_layers(keys, tensors, num_layers)
    width = _width(keys, tensors, sparse)
    return {
        "moe_num_experts": keys.size("expert_count"),
        "moe_k": keys.size("expert_used_count"),
        "moe_intermediate_size": width,
        "moe_num_shared_experts": _num_shared(keys, tensors, sparse, width),
        "moe_layer_start_index": keys.size("leading_dense_block_count", 0, low=0),
        "moe_layer_end_index": max(sparse),
        "moe_layer_interval": keys.size("interleave_moe_layer_step", 1),
    }


def _glm4_experts(keys: ArchitectureKeys, tensors: Tensors, num_layers: int) -> dict[str, Any]:
    _check_gating(keys, _SIGMOID)
    sparse = _sparse_layers(keys, tensors, num_layers)
    width = _width(keys, tensors, sparse)
    return {
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": width,
        "n_shared_experts": _num_shared(keys, tensors, sparse, width),
        "first_k_dense_replace": keys.size("leading_dense_block_count", 0, low=0),
        "n_group": max(1, keys.size("expert_group_count", 1, low=0)),
        "topk_group": max(1, keys.size("expert_group_used_count", 1, low=0)),
        "norm_topk_prob": keys.switch("expert_weights_norm", False),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
    }


_EXPERTS: Mapping[str, Callable[[ArchitectureKeys, Tensors, int], dict[str, Any]]] = {
    "qwen3": _qwen3_experts,
    "ernie": _ernie_experts,
    "glm4": _glm4_experts,
}


def make_generation_config(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the sampling parameters that the file proposes, by their names in generation_config.json.

    Args:
        metadata: of a `GGUFFile`.
        where: the file, as messages begin with it.

    Raises:
        ConfigError: a value has another type or is out of range; names the key.
    """
    found: dict[str, Any] = {}
    for name, key in SAMPLING_KEYS.items():
        value = metadata.get(f"general.sampling.{name}")
        if value is None:
            continue
        found[key] = shortest(value) if type(value) is float else value
        parse_generation_defaults({key: found[key]}, f"{where}: metadata general.sampling.{name}: ")
    return found
