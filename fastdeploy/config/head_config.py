# SPDX-License-Identifier: Apache-2.0
"""Description of a trained draft head of EAGLE's kinds, from its config.json and the shapes of its tensors.

Sources: SafeAILab/EAGLE, SpecForge, and vllm-project/speculators, whose files this reads as vLLM does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastdeploy.config.checkpoint_json import read_json_object
from fastdeploy.config.model_config import ModelConfig, parse_model_config
from fastdeploy.core.errors import ConfigError

EAGLE, EAGLE3 = "eagle", "eagle3"
HEAD_METHODS = (EAGLE, EAGLE3)
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
_SPECULATORS = "speculators_model_type"
_LAYER_KEYS = "transformer_layer_config"
_ARCHITECTURE = "LlamaForCausalLM"  # whose names and defaults the decoder layers of heads have
_REFUSED = {
    "norm_before_fc": "heads with one norm over all states of the target are not supported",
    "mask_token_id": "heads that draft in one pass are not supported",
    "parallel_drafting": "heads that draft in one pass are not supported",
}

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeadConfig:
    """A head that drafts with decoder layers of its own from states of its target.

    Attributes:
        method: `eagle` or `eagle3`.
        model: sizes of its decoder layers; `hidden_size` is the width of the states that it reads and recycles.
        target_width: width of the target's states.
        draft_vocab_size: number of ids that it drafts; fewer than the target's if it has a table `d2t`.
        taps: for each state of the target that the head reads, the layer whose input it is; the number of layers stands
            for the output of the last one. Empty if it reads the target's state after the final norm.
        norm_before_residual: whether what the first layer adds to is the normalised state instead of the state.
        recycles_normed: whether the next draft pass reads the output after the head's final norm instead of before it.
        has_fc_norms: whether each state of the target is normalised before the projection.
        has_fc_bias, has_qkv_bias, has_output_bias, has_mlp_bias: whether these linear layers have a bias.
        has_qk_norm: whether queries and keys are normalised before the rotation.
        has_embedding, has_head: whether the files hold an embedding and a head, which are the target's otherwise.
    """

    method: str
    model: ModelConfig
    target_width: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    norm_before_residual: bool
    recycles_normed: bool
    has_fc_norms: bool
    has_fc_bias: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    has_embedding: bool
    has_head: bool

    @property
    def identity(self) -> str:
        """Return all of it but its folder."""
        return repr(replace(self, model=replace(self.model, path="")))

    @property
    def has_reduced_vocabulary(self) -> bool:
        """Return whether drafts are some of the target's ids only, which a table in the files lists."""
        return self.draft_vocab_size < self.model.vocab_size

    @property
    def is_eagle3(self) -> bool:
        """Return whether the first layer projects [embedding ; state] to queries, keys and values."""
        return self.method == EAGLE3


def read_head_config(folder: Path, method: str, target: ModelConfig, shapes: Shapes) -> HeadConfig:
    """Read config.json of a head and compare it with its target.

    Args:
        method: `eagle` or `eagle3`.
        shapes: of the head's tensors, by the names of `models.heads.tensors`.

    Raises:
        ConfigError: a key is missing, not valid or not supported, or the head was made for another target.
    """
    raw = read_json_object(folder / "config.json", "model")
    if raw is None:
        raise ConfigError("model", f"{folder} has no config.json")
    where = f"{folder}/config.json: "
    _refuse_other_kinds(raw, where)
    layer = raw.get(_LAYER_KEYS, raw)
    if not isinstance(layer, Mapping):
        raise ConfigError("model", f"{where}{_LAYER_KEYS}: expected an object, got {layer!r:.100}")
    model = _read_layers(raw, layer, target, folder)
    width, num_taps = target.hidden_size, 0
    if method == EAGLE3:
        width = _integer(raw, "target_hidden_size", target.hidden_size, where)
        _check_equal("target_hidden_size", width, target.hidden_size, where)
        num_taps = _number_of_taps(raw, shapes, width, model.hidden_size, where)
    if not num_taps:
        _check_equal("hidden_size", model.hidden_size, target.hidden_size, where)
    _check_equal("vocab_size", model.vocab_size, target.vocab_size, where)
    draft_vocab_size = _integer(raw, "draft_vocab_size", model.vocab_size, where) if method == EAGLE3 else None
    if draft_vocab_size is not None and draft_vocab_size > model.vocab_size:
        raise ConfigError(
            "model", f"{where}draft_vocab_size {draft_vocab_size} is more than vocab_size {model.vocab_size}"
        )
    return HeadConfig(
        method=method,
        model=model,
        target_width=width,
        draft_vocab_size=draft_vocab_size or model.vocab_size,
        taps=_read_taps(raw, num_taps, target.num_layers, where),
        norm_before_residual=_switch(raw, "norm_before_residual", _SPECULATORS in raw, where),
        recycles_normed=_switch(raw, "norm_output", False, where),
        has_fc_norms=_switch(raw, "fc_norm", False, where),
        has_fc_bias="fc.bias" in shapes,
        has_qkv_bias="layers.0.self_attn.q_proj.bias" in shapes,
        has_output_bias="layers.0.self_attn.o_proj.bias" in shapes,
        has_mlp_bias="layers.0.mlp.gate_proj.bias" in shapes,
        has_qk_norm="layers.0.self_attn.q_norm.weight" in shapes,
        has_embedding="embed_tokens.weight" in shapes,
        has_head="lm_head.weight" in shapes,
    )


def _refuse_other_kinds(raw: Mapping[str, Any], where: str) -> None:
    nested = raw.get("eagle_config")
    for key, problem in _REFUSED.items():
        if raw.get(key) or (isinstance(nested, Mapping) and nested.get(key)):
            raise ConfigError("model", f"{where}{key}: {problem}")


def _read_layers(raw: Mapping[str, Any], layer: Mapping[str, Any], target: ModelConfig, folder: Path) -> ModelConfig:
    """Return the sizes of the decoder layers, in the target's dtype.

    The context of these files is often that of the training, which does not limit the positions that are drafted.
    """
    values = {
        **{key: raw[key] for key in ("quantization_config", "compression_config") if key in raw},
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        **layer,
        "architectures": [_ARCHITECTURE],
        "tie_word_embeddings": False,
        "dtype": None,
        "torch_dtype": None,
    }
    model = parse_model_config(values, {}, path=str(folder), dtype=target.dtype)
    if model.quantization_method:
        raise ConfigError("model", f"{folder}/config.json: heads whose weights are stored as codes are not supported")
    return replace(model, has_int8_cache=target.has_int8_cache)


def _number_of_taps(raw: Mapping[str, Any], shapes: Shapes, width: int, hidden_size: int, where: str) -> int:
    """Return how many states of the target `fc` joins; 0 if the head reads the last state only, without it."""
    nested = raw.get("eagle_config")
    holder = nested if isinstance(nested, Mapping) else {}
    if not _switch(holder, "use_aux_hidden_state", True, f"{where}eagle_config."):
        return 0
    shape = shapes.get("fc.weight", (0, 0))
    if len(shape) != 2 or shape[0] != hidden_size or not shape[1] or shape[1] % width:
        raise ConfigError(
            "model", f"{where}fc.weight is {list(shape)}, expected [hidden_size {hidden_size}, a multiple of {width}]"
        )
    num_taps = shape[1] // width
    stated = _integer(raw, "num_aux_hidden_states", num_taps, where)
    _check_equal("num_aux_hidden_states", stated, num_taps, where, "fc.weight reads")
    return num_taps


def _read_taps(raw: Mapping[str, Any], count: int, num_layers: int, where: str) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads.

    The key at the top numbers the inputs of layers. In `eagle_config` it numbers their outputs, and -1 is the
    embedding.
    """
    if not count:
        return ()
    nested, offset, key = raw.get("eagle_config"), 0, TAPS_KEY
    found = raw.get(TAPS_KEY)
    if found is None and isinstance(nested, Mapping) and nested.get(TAPS_KEY) is not None:
        found, offset, key = nested[TAPS_KEY], 1, f"eagle_config.{TAPS_KEY}"
    if found is None:
        if count != 3:
            raise ConfigError("model", f"{where}{TAPS_KEY} is missing; fc.weight joins {count} states")
        found = [2, num_layers // 2, num_layers - 3]
    is_list = isinstance(found, list) and all(type(item) is int for item in found)
    if not is_list or not all(0 <= item + offset <= num_layers for item in found):
        raise ConfigError("model", f"{where}{key}: expected layers of the target's {num_layers}, got {found!r:.100}")
    _check_equal(f"the length of {key}", len(found), count, where, "fc.weight joins")
    return tuple(item + offset for item in found)


def _check_equal(key: str, found: int, expected: int, where: str, reason: str = "the target has") -> None:
    if found != expected:
        raise ConfigError("model", f"{where}{key} is {found}, but {reason} {expected}")


def _integer(raw: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = default if raw.get(key) is None else raw[key]
    if type(value) is not int or value < 1:
        raise ConfigError("model", f"{where}{key}: expected a positive integer, got {value!r:.100}")
    return value


def _switch(raw: Mapping[str, Any], key: str, default: bool, where: str) -> bool:
    value = default if raw.get(key) is None else raw[key]
    if type(value) is not bool:
        raise ConfigError("model", f"{where}{key}: expected true or false, got {value!r:.100}")
    return value
