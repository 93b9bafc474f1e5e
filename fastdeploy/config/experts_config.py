# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts, as a checkpoint's config.json describes them; each family has keys of its own."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fastdeploy.config.checkpoint_json import check_values
from fastdeploy.config.family_defaults import FamilyDefaults, find_defaults
from fastdeploy.config.flag import Flag, integer, number, switch
from fastdeploy.core.errors import ConfigError

MAX_EXPERTS = 1024
MAX_EXPERTS_PER_ROW = 32
_MAX_EXPERTS_OF_ALL_LAYERS = 2**17  # five times as many as any released model has
_MAX_LAYERS = 2**12
_EXPERTS = integer(1, MAX_EXPERTS)
_CHOSEN = integer(1, MAX_EXPERTS_PER_ROW)
_WIDTH = integer(1, 2**22)
_SHARED = integer(0, MAX_EXPERTS)
_LAYER_IDS = Flag(
    "json",
    "a list of layers",
    lambda value: isinstance(value, list) and all(type(item) is int and 0 <= item < _MAX_LAYERS for item in value),
)
EXPERTS_KEYS: Mapping[str, Flag] = {
    "moe_num_experts": _EXPERTS,
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "moe_k": _CHOSEN,
    "num_experts_per_tok": _CHOSEN,
    "moe_intermediate_size": _WIDTH,
    "moe_num_shared_experts": _SHARED,
    "n_shared_experts": _SHARED,
    "moe_layer_start_index": integer(0, _MAX_LAYERS),
    "moe_layer_end_index": integer(-1, _MAX_LAYERS),
    "moe_layer_interval": integer(1, _MAX_LAYERS),
    "moe_norm_min": number(0.0, 1.0),
    "decoder_sparse_step": integer(1, _MAX_LAYERS),
    "mlp_only_layers": _LAYER_IDS,
    "first_k_dense_replace": integer(0, _MAX_LAYERS),
    "moe_layer_freq": integer(1, _MAX_LAYERS),
    "n_group": integer(1, MAX_EXPERTS),
    "topk_group": integer(1, MAX_EXPERTS),
    "routed_scaling_factor": number(1e-6, 1e6),
    "norm_topk_prob": switch(),
}
"""Keys of config.json that are used, and their values."""

KEYS_OF_SIZES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "Ernie4_5_MoeForCausalLM": (("num_experts", "moe_num_experts"), ("num_experts_per_tok", "moe_k")),
    "Qwen3MoeForCausalLM": (("num_local_experts", "num_experts"),),
    "Glm4MoeForCausalLM": (("num_local_experts", "n_routed_experts"),),
    "DeepseekV2ForCausalLM": (("num_experts", "n_routed_experts"),),
    "DeepseekV3ForCausalLM": (("num_local_experts", "n_routed_experts"),),
    "Glm4MoeLiteForCausalLM": (("num_local_experts", "n_routed_experts"),),
}
"""Spellings of one size in each family; the first one counts if several are there, as in transformers."""


@dataclass(frozen=True)
class RouterRule:
    """How a router turns logits into experts and weights.

    Scores are softmax or sigmoid of the logits, in fp32. The correction bias is added to the scores for the choice
    only. With several groups of neighbouring experts, only the experts of the best groups can be chosen. Of equal
    scores the lower id is chosen, for experts and for groups. The weights of the chosen experts are their scores,
    normalised and scaled.

    Attributes:
        num_chosen: experts per row.
        scoring: how logits become scores.
        num_groups, num_kept_groups: groups of experts, and how many of them remain.
        group_score: the score of a group: its largest score, or the sum of its two largest ones.
        normalisation: "none"; "clamp": weights / max(their sum, epsilon); "add": weights / (their sum + epsilon).
        epsilon: of the normalisation.
        scale: factor of the weights after normalisation.
    """

    num_chosen: int
    scoring: Literal["softmax", "sigmoid"]
    num_groups: int = 1
    num_kept_groups: int = 1
    group_score: Literal["largest", "two_largest"] = "largest"
    normalisation: Literal["none", "clamp", "add"] = "none"
    epsilon: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a model; all its sparse layers have the same sizes.

    Attributes:
        num_experts: routed experts of a layer.
        width: neurons of a routed expert.
        shared_width: neurons of the shared expert; 0 if there is none.
        has_correction_bias: whether the router has a bias for the choice.
        rule: how the router chooses.
        sparse_layers: for each layer of the decoder whether it has experts; the others have a dense block.
    """

    num_experts: int
    width: int
    shared_width: int
    has_correction_bias: bool
    rule: RouterRule
    sparse_layers: tuple[bool, ...]


class _Keys:
    """Values of config.json, whose types and ranges are checked."""

    def __init__(self, raw: Mapping[str, Any], defaults: FamilyDefaults, where: str) -> None:
        self._raw, self._defaults, self._where = raw, defaults, where

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or the default if the key is absent or null."""
        value = self._raw.get(key)
        return default if value is None else value

    def of_family(self, key: str) -> Any:
        """Return a value that has a default among those of the family."""
        return self._defaults.value(self._raw, key)

    def needed(self, *keys: str) -> int:
        """Return the value of the first of these keys that is there."""
        for key in keys:
            if (value := self._raw.get(key)) is not None:
                return int(value)
        raise self.error(keys[-1], f"expected {EXPERTS_KEYS[keys[-1]].expected}, got None")

    def expect(self, values: Mapping[str, Any]) -> None:
        """Refuse other values of these keys; a key that is absent or null is as expected."""
        for key, expected in values.items():
            if (value := self._raw.get(key)) not in (expected, None):
                raise self.error(key, f"only {expected!r} is supported with experts, got {value!r:.100}")

    def one_of(self, key: str, *values: str) -> str:
        """Return one of these values of a key, the first one if the key is absent or null; refuse others."""
        value = self.get(key, values[0])
        if value not in values:
            expected = " and ".join(map(repr, values))
            raise self.error(key, f"only {expected} are supported with experts, got {value!r:.100}")
        return str(value)

    def error(self, key: str, message: str) -> ConfigError:
        """Return the error that names a key and the file."""
        return ConfigError(key, f"{self._where}{message}")


def parse_experts(raw: Mapping[str, Any], architecture: str, num_layers: int, where: str) -> ExpertsConfig | None:
    """Read the keys of an architecture with experts; None for architectures without.

    Args:
        raw: the whole config.json.
        where: the file, as messages begin with it.

    Raises:
        ConfigError: a value is missing or not valid, or a variant is not supported; names the key.
    """
    parse = _FAMILIES.get(architecture)
    if parse is None:
        return None
    if architecture.startswith("Ernie"):
        _refuse_lists(raw, where)
    check_values(raw, EXPERTS_KEYS, where)
    experts = parse(_Keys(raw, find_defaults(raw, architecture), where), num_layers)
    _check_sizes(experts, "moe_k" if parse is _ernie else "num_experts_per_tok", where)
    return experts


def _refuse_lists(raw: Mapping[str, Any], where: str) -> None:
    for key in ("moe_num_experts", "moe_intermediate_size", "moe_layer_start_index", "moe_layer_end_index", "moe_k"):
        if isinstance(raw.get(key), list):
            message = f"{where}a list is for vision-language models, which are not supported, got {raw[key]!r:.100}"
            raise ConfigError(key, message)


def _ernie(keys: _Keys, num_layers: int) -> ExpertsConfig:
    keys.expect(
        {
            "use_moe": True,
            "use_bias": False,
            "moe_gate_act": "softmax",
            "moe_use_aux_free": True,
            "moe_norm_gate_logits": True,
        }
    )
    width, epsilon = keys.needed("moe_intermediate_size"), float(keys.get("moe_norm_min", 1e-12))
    first, last = keys.get("moe_layer_start_index", 1), keys.get("moe_layer_end_index", -1)
    last, interval = num_layers - 1 if last == -1 else last, keys.get("moe_layer_interval", 1)
    return ExpertsConfig(
        num_experts=keys.needed("num_experts", "moe_num_experts"),
        width=width,
        shared_width=width * keys.of_family("moe_num_shared_experts"),
        has_correction_bias=True,
        rule=RouterRule(keys.needed("num_experts_per_tok", "moe_k"), "softmax", normalisation="clamp", epsilon=epsilon),
        sparse_layers=tuple((i + 1) % interval == 0 and first <= i <= last for i in range(num_layers)),
    )


def _qwen3(keys: _Keys, num_layers: int) -> ExpertsConfig:
    step, dense = keys.get("decoder_sparse_step", 1), set(keys.get("mlp_only_layers", []))
    normalisation: Literal["add", "none"] = "add" if keys.get("norm_topk_prob", False) else "none"
    return ExpertsConfig(
        num_experts=keys.needed("num_local_experts", "num_experts"),
        width=keys.needed("moe_intermediate_size"),
        shared_width=0,
        has_correction_bias=False,
        rule=RouterRule(keys.needed("num_experts_per_tok"), "softmax", normalisation=normalisation),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    )


@dataclass(frozen=True)
class _SigmoidDefaults:
    """What a family with sigmoid scores takes for keys that are left out."""

    first_k_dense_replace: int = 1
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0


def _sigmoid(defaults: _SigmoidDefaults, keys: _Keys, num_layers: int) -> ExpertsConfig:
    keys.expect({"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    width = keys.needed("moe_intermediate_size")
    scale = float(keys.get("routed_scaling_factor", defaults.routed_scaling_factor))
    is_normalised = keys.of_family("norm_topk_prob")
    return ExpertsConfig(
        num_experts=keys.needed("num_local_experts", "n_routed_experts"),
        width=width,
        shared_width=width * keys.get("n_shared_experts", 1),
        has_correction_bias=True,
        rule=RouterRule(
            keys.needed("num_experts_per_tok"),
            "sigmoid",
            num_groups=keys.get("n_group", defaults.n_group),
            num_kept_groups=keys.get("topk_group", defaults.topk_group),
            group_score="two_largest",
            normalisation="add" if is_normalised else "none",
            epsilon=1e-20 if is_normalised else 0.0,
            scale=scale,
        ),
        sparse_layers=_layers_after_dense(keys, defaults.first_k_dense_replace, num_layers),
    )


def _deepseek_v2(keys: _Keys, num_layers: int) -> ExpertsConfig:
    keys.expect({"scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False})
    is_grouped = keys.one_of("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    width = keys.needed("moe_intermediate_size")
    return ExpertsConfig(
        num_experts=keys.needed("num_experts", "n_routed_experts"),
        width=width,
        shared_width=width * keys.get("n_shared_experts", 2),
        has_correction_bias=False,
        rule=RouterRule(
            keys.needed("num_experts_per_tok"),
            "softmax",
            num_groups=keys.needed("n_group") if is_grouped else 1,
            num_kept_groups=keys.needed("topk_group") if is_grouped else 1,
            scale=float(keys.get("routed_scaling_factor", 1.0)),
        ),
        sparse_layers=_layers_after_dense(keys, 0, num_layers),
    )


def _glm4_lite(keys: _Keys, num_layers: int) -> ExpertsConfig:
    experts = _sigmoid(_SigmoidDefaults(routed_scaling_factor=1.8), keys, num_layers)
    kinds = ["sparse" if is_sparse else "dense" for is_sparse in experts.sparse_layers]
    if (found := keys.get("mlp_layer_types", kinds)) != kinds:
        count = kinds.index("sparse") if "sparse" in kinds else num_layers
        expected = f"'dense' for the first {count} of {num_layers} layers, then 'sparse', as first_k_dense_replace says"
        raise keys.error("mlp_layer_types", f"expected {expected}, got {reprlib.repr(found)}")
    return experts


def _layers_after_dense(keys: _Keys, first_k_dense: int, num_layers: int) -> tuple[bool, ...]:
    dense, step = keys.get("first_k_dense_replace", first_k_dense), keys.get("moe_layer_freq", 1)
    return tuple(i >= dense and i % step == 0 for i in range(num_layers))


_FAMILIES: Mapping[str, Callable[[_Keys, int], ExpertsConfig]] = {
    "Ernie4_5_MoeForCausalLM": _ernie,
    "Qwen3MoeForCausalLM": _qwen3,
    "Glm4MoeForCausalLM": partial(_sigmoid, _SigmoidDefaults()),
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": partial(_sigmoid, _SigmoidDefaults(3, n_group=8, topk_group=4, routed_scaling_factor=2.5)),
    "Glm4MoeLiteForCausalLM": _glm4_lite,
}


def _check_sizes(experts: ExpertsConfig, key_of_chosen: str, where: str) -> None:
    """Refuse routers that cannot choose as many experts as they should."""
    rule, num_experts = experts.rule, experts.num_experts
    if not any(experts.sparse_layers):
        raise ConfigError("architectures", f"{where}no layer has experts, contrary to the architecture")
    if (total := num_experts * sum(experts.sparse_layers)) > _MAX_EXPERTS_OF_ALL_LAYERS:
        limit = _MAX_EXPERTS_OF_ALL_LAYERS
        raise ConfigError("num_hidden_layers", f"{where}expected at most {limit} experts in all layers, got {total}")
    if num_experts % rule.num_groups:
        raise ConfigError("n_group", f"{where}{rule.num_groups} does not divide {num_experts} experts")
    if rule.num_kept_groups > rule.num_groups:
        raise ConfigError(
            "topk_group", f"{where}expected at most n_group {rule.num_groups}, got {rule.num_kept_groups}"
        )
    group_size = num_experts // rule.num_groups
    if rule.num_groups > 1 and group_size < 2:
        raise ConfigError("n_group", f"{where}expected groups of at least 2 experts, got {group_size}")
    available = group_size * rule.num_kept_groups
    if rule.num_chosen > available:
        kept = f" of {rule.num_kept_groups} groups" if rule.num_groups > 1 else ""
        raise ConfigError(key_of_chosen, f"{where}expected at most {available} experts{kept}, got {rule.num_chosen}")
