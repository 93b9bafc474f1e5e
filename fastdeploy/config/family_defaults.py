# SPDX-License-Identifier: Apache-2.0
"""What each family of models takes for keys that config.json leaves out: transformers' values, or PaddleNLP's.

scripts/make_family_defaults.py writes transformers' values for the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from fastdeploy.core.errors import ConfigError


@dataclass(frozen=True)
class FamilyDefaults:
    """Values for keys that config.json leaves out.

    Attributes:
        num_key_value_heads: None for as many as there are query heads.
        head_dim: None for hidden_size / num_attention_heads.
        has_sliding_window: the family has keys for sliding windows; `sliding_window` is the window.
        slides_everywhere: all layers have a window if any has, whatever max_window_layers says.
        moe_num_shared_experts: of ERNIE.
        norm_topk_prob: of routers with sigmoid scores.
        q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, rope_interleave: of latent attention.
        null_is_absent: whether null stands for the default also where it has a meaning of its own (`NULL_VALUES`).
    """

    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    has_sliding_window: bool = False
    sliding_window: int | None = None
    slides_everywhere: bool = False
    partial_rotary_factor: float = 1.0
    moe_num_shared_experts: int = 2
    norm_topk_prob: bool = True
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True
    null_is_absent: bool = False

    def value(self, raw: Mapping[str, Any], key: str) -> Any:
        """Return a value of config.json; its default if the key is absent or, for most keys, null."""
        value = raw.get(key)
        if value is None and key in NULL_VALUES and key in raw and not self.null_is_absent:
            return NULL_VALUES[key]
        return getattr(self, key) if value is None else value


NULL_VALUES: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
    "norm_topk_prob": False,
    "q_lora_rank": None,
    "rope_interleave": False,
}
"""Keys whose null is not the default; None means what the attributes of `FamilyDefaults` say."""

_QWEN = FamilyDefaults(
    max_position_embeddings=32768, num_key_value_heads=32, has_sliding_window=True, sliding_window=4096
)
_ERNIE = FamilyDefaults(
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
    num_key_value_heads=2,
    head_dim=128,
)
TRANSFORMERS: Mapping[str, FamilyDefaults] = {
    "LlamaForCausalLM": FamilyDefaults(),
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": replace(_QWEN, head_dim=128),
    "Ernie4_5ForCausalLM": _ERNIE,
    "Ernie4_5_MoeForCausalLM": replace(_ERNIE, num_key_value_heads=4, head_dim=None),
    "Qwen3MoeForCausalLM": replace(_QWEN, num_key_value_heads=4, slides_everywhere=True),
    "Glm4MoeForCausalLM": FamilyDefaults(
        rms_norm_eps=1e-5, max_position_embeddings=131072, num_key_value_heads=8, partial_rotary_factor=0.5
    ),
    "DeepseekV2ForCausalLM": FamilyDefaults(),
    "DeepseekV3ForCausalLM": FamilyDefaults(max_position_embeddings=4096),
    "Glm4MoeLiteForCausalLM": FamilyDefaults(
        rms_norm_eps=1e-5, max_position_embeddings=202752, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256
    ),
}
_PADDLENLP_HEAD_DIMS = dict.fromkeys(("Ernie4_5_MoeForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM"), 128)
PADDLENLP: Mapping[str, FamilyDefaults] = {
    name: replace(
        family,
        num_key_value_heads=None,
        head_dim=_PADDLENLP_HEAD_DIMS.get(name, family.head_dim),
        moe_num_shared_experts=0,
        null_is_absent=True,
    )
    for name, family in TRANSFORMERS.items()
}


def find_defaults(raw: Mapping[str, Any], architecture: str) -> FamilyDefaults:
    """Return the defaults of the library that wrote config.json."""
    return (TRANSFORMERS if raw.get("paddlenlp_version") is None else PADDLENLP)[architecture]


def find_sliding_window(raw: Mapping[str, Any], num_layers: int, defaults: FamilyDefaults) -> int | None:
    """Return the window if a layer uses it: switch, then layer types, then `max_window_layers`.

    Raises:
        ConfigError: layers are of a type that is not supported.
    """
    kinds = raw.get("layer_types")
    if kinds is not None:
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ConfigError("layer_types", f"layers of type {', '.join(map(repr, unknown))} are not supported")
    if not defaults.has_sliding_window or not raw.get("use_sliding_window"):
        return None
    window = cast("int | None", defaults.value(raw, "sliding_window"))
    if defaults.slides_everywhere:
        return window
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    last = raw.get("max_window_layers")
    return window if (28 if last is None else last) < num_layers else None
