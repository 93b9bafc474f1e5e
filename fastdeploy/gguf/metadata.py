# SPDX-License-Identifier: Apache-2.0
"""Values of a GGUF file's metadata by key, each of which is used, has no effect, or is refused by name.

The keys are those of llama.cpp (gguf-py/gguf/constants.py). Numbers are stored in fp32, of which the shortest decimal
that stands for the same fp32 number is taken: 9.99999975e-06 is 1e-05.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from fastdeploy.core.errors import ConfigError
from fastdeploy.gguf.header import shown

FIELD = "model"  # of errors: the flag that names the file
ARCHITECTURE = "general.architecture"
_MAX_SIZE = 2**31 - 1
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "activation_sparsity_scale": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_gating_func": (0,),
    "expert_group_count": (0, 1),
    "expert_group_scale": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (False, True),
    "expert_weights_scale": (0, 1),
    "experts_per_group": (0, 1),
    "final_logit_softcapping": (0,),
    "hidden_activation": ("silu", "swish"),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "n_deepstack_layers": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (0,),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 0),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "swin_norm": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys of an architecture that change results, with the values that do not; those that are read need no entry."""

_WITHOUT_EFFECT = ("rope.scaling.finetuned", "rope.scaling.original_context_length")
_SAMPLING = "general.sampling."
SAMPLING_KEYS: Mapping[str, str] = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys of `general.sampling`, and those of generation_config.json."""

_OWN_NAMESPACES = ("general.", "tokenizer.", "split.", "quantize.")


class ArchitectureKeys:
    """The keys `<architecture>.*` of a file, of which those that nobody asked for are refused at the end."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        """Find the architecture.

        Args:
            metadata: of the file.
            where: the file, as messages begin with it.

        Raises:
            ConfigError: there is no architecture, or the file is no model.
        """
        self.where, self._metadata = where, metadata
        kind = metadata.get("general.type", "model")
        if kind != "model":
            raise ConfigError(FIELD, f"{where}: metadata general.type: expected model, got {kind!r:.80}")
        self.architecture = metadata.get(ARCHITECTURE)
        if not isinstance(self.architecture, str):
            raise self.error(ARCHITECTURE, f"expected the name of an architecture, got {self.architecture!r:.80}")
        self._prefix = f"{self.architecture}."
        self._used: set[str] = set()

    def error(self, key: str, problem: str) -> ConfigError:
        """Return the error that names a key, given with its namespace, and the file."""
        return ConfigError(FIELD, f"{self.where}: metadata {shown(key)}: {problem}")

    def refuse(self, key: str, problem: str) -> ConfigError:
        """Return the error that names a key of the architecture and the file."""
        return self.error(self._prefix + key, problem)

    def get(self, key: str) -> Any:
        """Return a value of the architecture, or None; a list that repeats one value for each layer is that value."""
        self._used.add(key)
        value = self._metadata.get(self._prefix + key)
        if isinstance(value, list):
            if len({repr(item) for item in value}) != 1:
                raise self.refuse(key, f"a list of different values is not supported, got {value!r:.80}")
            return value[0]
        return value

    def size(self, key: str, default: int | None = None, low: int = 1, high: int = _MAX_SIZE) -> int:
        """Return an integer in [low, high].

        Raises:
            ConfigError: it is missing and has no default, or is something else.
        """
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(key, f"expected an integer in [{low}, {high}], got {value!r:.80}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number, as the shortest decimal.

        Raises:
            ConfigError: it is missing and has no default, or is something else.
        """
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float):
            raise self.refuse(key, f"expected a number, got {value!r:.80}")
        return shortest(float(value))

    def switch(self, key: str, default: bool) -> bool:
        """Return true or false.

        Raises:
            ConfigError: it is something else.
        """
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.refuse(key, f"expected true or false, got {value!r:.80}")
        return value

    def expect(self, key: str, expected: Any, source: str) -> None:
        """Refuse a value that is there and is not what something else says.

        Args:
            source: what says it.
        """
        value = self.get(key)
        if value is not None and value != expected:
            raise self.refuse(key, f"is {value!r:.80}, but {source} says {expected}")

    def refuse_unused(self) -> None:
        """Refuse keys that may change results and that nothing has asked for.

        Raises:
            ConfigError: names the key and its value.
        """
        names = (key.removeprefix(self._prefix) for key in self._metadata if key.startswith(self._prefix))
        for name in names:
            if name in self._used or name in _WITHOUT_EFFECT:
                continue
            neutral, value = _NEUTRAL.get(name, ()), self.get(name)
            if not neutral:
                raise self.refuse(name, f"is not known and may change results, got {value!r:.80}")
            if type(value) not in (bool, int, float, str) or not _is_one_of(value, neutral):
                supported = " or ".join(map(str, neutral))
                raise self.refuse(name, f"only {supported} is supported, got {value!r:.80}")


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether a value is neutral; numbers are never switches."""
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)


def shortest(value: float) -> float:
    """Return the number whose decimal is the shortest that stands for the same fp32 number."""
    if value != value or abs(value) > 3.4e38 or _as_fp32(value) != value:
        return value  # is no fp32 number
    return next(found for digits in range(1, 18) if _as_fp32(found := float(f"{value:.{digits}g}")) == value)


def _as_fp32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("inf")


def metadata_notes(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key that looks as if it had an effect and has none."""
    architecture = metadata.get(ARCHITECTURE)
    for key, value in metadata.items():
        name = key.removeprefix(_SAMPLING)
        is_ours = key.startswith((f"{architecture}.", *_OWN_NAMESPACES))
        if not is_ours or (name != key and name not in SAMPLING_KEYS):
            yield f"metadata {shown(key)} {reprlib.repr(value)} has no effect"
