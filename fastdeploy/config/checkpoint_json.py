# SPDX-License-Identifier: Apache-2.0
"""Reads JSON files of a checkpoint, and checks types and ranges of their values before anything is computed with them.

A checkpoint is made by others. Whatever its files hold, they are read or refused with one ConfigError.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdeploy.config.flag import Flag, integer, number, switch
from fastdeploy.core.errors import ConfigError

GGUF_NOTES = "gguf_notes"  # lines about metadata without effect, in a config.json that was made from a GGUF file
_INT32_MAX = 2**31 - 1
_MAX_HEAD_DIM = 256  # what the attention kernels hold
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TOKEN_IDS = Flag(
    "json",
    "a token id or a list of them",
    lambda value: all(_is_token_id(item) for item in (value if isinstance(value, list) else [value])),
)
_STRINGS = Flag(
    "json", "a list of strings", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value)
)
_NAME = Flag("str", "a name of at most 100 characters", lambda value: isinstance(value, str) and len(value) <= 100)
_TOKEN = Flag("json", "a text or an object with its content", lambda value: _is_token(value))
_TOKENS = Flag("json", "a list of tokens", lambda value: isinstance(value, list) and all(map(_is_token, value)))
_NAMED_TOKENS = Flag(
    "json", "an object of tokens", lambda value: isinstance(value, Mapping) and all(map(_is_token, value.values()))
)
_TOKENS_OR_NAMED_TOKENS = Flag(
    "json", "a list or an object of tokens", lambda value: _TOKENS.is_valid(value) or _NAMED_TOKENS.is_valid(value)
)
_FACTOR = number(1e-6, 1e6)
_FACTORS = Flag(
    "json",
    "a list of numbers in [1e-06, 1000000.0]",
    lambda value: isinstance(value, list) and all(map(_FACTOR.is_valid, value)),
)
_TEXT_OR_LIST = Flag("json", "a string or a list", lambda value: isinstance(value, (str, list)))

MODEL_KEYS: Mapping[str, Flag] = {
    "dtype": _NAME,
    "torch_dtype": _NAME,
    "hidden_act": _NAME,
    "hidden_size": integer(1, 2**20),
    "intermediate_size": integer(1, 2**22),
    "num_hidden_layers": integer(1, 2**12),
    "num_attention_heads": integer(1, 2**14),
    "num_key_value_heads": integer(1, 2**14),
    "head_dim": integer(1, 2**14),
    "vocab_size": integer(1, 2**26),
    "max_position_embeddings": integer(1, _INT32_MAX),
    "original_max_position_embeddings": number(1, _INT32_MAX),
    "rms_norm_eps": number(1e-12, 1.0),
    "rope_theta": number(0.0, 1e30),
    "partial_rotary_factor": number(0.0, 1.0),
    "rope_scaling_type": _NAME,
    "rope_scaling_factor": number(1.0, 1e6),
    "sliding_window": integer(0, _INT32_MAX),
    "max_window_layers": integer(0, _INT32_MAX),
    "use_sliding_window": switch(),
    "layer_types": _STRINGS,
    "tie_word_embeddings": switch(),
    "attention_bias": switch(),
    "mlp_bias": switch(),
    "use_bias": switch(),
    "use_qk_norm": switch(),
    "eos_token_id": _TOKEN_IDS,
    GGUF_NOTES: _STRINGS,
}
"""Keys of config.json that are used, and their values; the largest sizes are far above those of any model."""

ROPE_KEYS: Mapping[str, Flag] = {
    "rope_type": _NAME,
    "type": _NAME,
    "rope_theta": MODEL_KEYS["rope_theta"],
    "partial_rotary_factor": MODEL_KEYS["partial_rotary_factor"],
    "original_max_position_embeddings": MODEL_KEYS["original_max_position_embeddings"],
    "factor": MODEL_KEYS["rope_scaling_factor"],
    "low_freq_factor": number(1e-6, 1e6),
    "high_freq_factor": number(1e-6, 1e6),
    "beta_fast": number(0.0, 1e6),
    "beta_slow": number(0.0, 1e6),
    "truncate": switch(),
    "attention_factor": number(1e-6, 1e6),
    "mscale": number(0.0, 1e6),
    "mscale_all_dim": number(0.0, 1e6),
    "freq_factors": _FACTORS,
}
"""The same for the object that holds the settings of rotary embeddings."""

GENERATION_KEYS: Mapping[str, Flag] = {"do_sample": switch(), "eos_token_id": _TOKEN_IDS}
"""The same for generation_config.json, besides the sampling parameters."""

TOKENIZER_KEYS: Mapping[str, Flag] = {
    **dict.fromkeys(
        ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), _TOKEN
    ),
    "additional_special_tokens": _TOKENS,
    "extra_special_tokens": _TOKENS_OR_NAMED_TOKENS,
    "model_specific_special_tokens": _NAMED_TOKENS,
    "added_tokens_decoder": Flag("json", "an object of added tokens by id", lambda value: _is_added_tokens(value)),
    "add_bos_token": switch(),
    "add_eos_token": switch(),
    "split_special_tokens": switch(),
    "tokenizer_class": _NAME,
    "chat_template": _TEXT_OR_LIST,
}
"""The same for tokenizer_config.json and special_tokens_map.json."""


def read_json_object(file: Path, field: str) -> dict[str, Any] | None:
    """Return the JSON object of a file, or None if there is no such file.

    Raises:
        ConfigError: the file cannot be read or does not contain an object; names `field` and the file.
    """
    try:
        content = file.read_text(encoding="utf-8")
        value = json.loads(content)
        if _SURROGATE.search(content):  # the escape may be half of a pair, which is no text
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        return None
    except RecursionError:
        raise ConfigError(field, f"cannot read {file}: its brackets are nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigError(field, f"cannot read {file}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(field, f"cannot read {file}: expected a JSON object, got a {type(value).__name__}")
    return value


def check_values(values: Mapping[str, Any], keys: Mapping[str, Flag], where: str, section: str = "") -> None:
    """Check the values of a file, of which null is always valid.

    Args:
        keys: valid values; other keys are not checked.
        where: the file, as messages begin with it.
        section: key of the object that holds the values; empty for the whole file.

    Raises:
        ConfigError: a value has another type or is out of range; names the key, the file and the valid values.
    """
    for key, valid in keys.items():
        value = values.get(key)
        if value is not None and not valid.is_valid(value):
            message = f"{where}expected {valid.expected}, got {reprlib.repr(value)}"
            raise ConfigError(section or key, f"{section}.{key}: {message}" if section else message)


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _INT32_MAX


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and isinstance(value.get("content"), str))


def _is_added_tokens(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        key.isascii() and key.isdigit() and isinstance(token, Mapping) and _is_token(token)
        for key, token in value.items()
    )


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise ConfigError if the attention kernels cannot compute heads of these numbers and this size."""
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        raise ConfigError("head_dim", f"expected an even number up to {_MAX_HEAD_DIM}, got {head_dim}")
    if num_heads % num_kv_heads:
        raise ConfigError("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
