# SPDX-License-Identifier: Apache-2.0
"""Configuration of speculation: `--speculative-config`, the YAML mapping, or `LLM(speculative_config=...)`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastdeploy.config.drafting_checkpoint import infer_method
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.errors import ConfigError

METHOD_ALIASES = {"ngram_match": "ngram", "[ngram]": "ngram", "deepseek_mtp": "mtp", "ernie_mtp": "mtp"}
METHODS = ("naive", "ngram", "suffix", "mtp", "draft_model")
PLANNED_METHODS = ("eagle", "eagle3", "medusa", "hydra", "mlp_speculator")
VERIFY_STRATEGIES = ("topp", "target_match", "greedy", "topp_relaxed")
ACCEPT_POLICIES = ("normal", "accept_all", "reject_all")
KEY_ALIASES = {"prompt_lookup_max": "max_ngram_size", "prompt_lookup_min": "min_ngram_size"}
KEYS = (
    "method",
    "num_speculative_tokens",
    "verify_strategy",
    "accept_policy",
    "max_ngram_size",
    "min_ngram_size",
    "adaptive",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    "suffix_decoding_max_cache_bytes",
    "num_model_steps",
    "mtp_strategy",
    "model",
    "quantization",
    "revision",
    "draft_tensor_parallel_size",
)
KEYS_WITHOUT_EFFECT = ("disable_padded_drafter_batch", "enforce_eager", "max_candidate_len", "verify_window")
REMOVED_KEYS = {
    "suffix_decoding_snapshot_path": "was removed: suffix decoding keeps its outputs in memory only; remove the key"
}
MAX_SPECULATIVE_TOKENS = 16
DEFAULT_SPECULATIVE_TOKENS = dict.fromkeys(("ngram", "suffix"), MAX_SPECULATIVE_TOKENS)  # only those that pay; else 1
MAX_MODEL_STEPS = 8
MAX_NGRAM_SIZE = 16
EXTENSIONS = {"default": None, "with_ngram": "ngram", "with_suffix": "suffix"}  # mtp_strategy: who else drafts
MODEL_METHODS = ("mtp", "draft_model")
OWNERS_OF_KEYS = {  # by prefix
    "suffix_decoding_": ("suffix",),
    "max_ngram_size": ("ngram",),
    "min_ngram_size": ("ngram",),
    "num_model_steps": ("mtp",),
    "mtp_strategy": ("mtp",),
    "model": MODEL_METHODS,
    "quantization": MODEL_METHODS,
    "revision": MODEL_METHODS,
    "draft_tensor_parallel_size": MODEL_METHODS,
}
FIELD = "speculative_config"


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made and judged.

    Attributes:
        method: naive (no drafts), ngram, suffix, mtp or draft_model.
        num_speculative_tokens: K, most drafts verified per step and request; 0 for naive.
        verify_strategy: topp and target_match accept a draft that equals the target's draw; greedy forces
            temperature 0; topp_relaxed accepts every draft inside the target's surviving set and is lossy.
        accept_policy: normal; accept_all and reject_all are for debugging speed.
        max_ngram_size, min_ngram_size: longest and shortest suffix that ngram looks up.
        adaptive: verify only the drafts that are expected to pay for their rows; a user's mapping has it on unless it
            says otherwise.
        suffix_decoding_max_tree_depth: tokens of a match and its continuation together.
        suffix_decoding_max_cached_requests: finished outputs kept to draft from; -1 as many as the bytes allow, 0 none.
        suffix_decoding_max_spec_factor: a match of m tokens drafts at most m * factor.
        suffix_decoding_min_token_prob: a draft ends where its probability, by past counts, falls below.
        suffix_decoding_max_cache_bytes: memory of the finished outputs.
        num_model_steps: drafts that mtp's layer makes per step.
        mtp_strategy: default: the layer alone drafts; with_ngram, with_suffix: that method goes on behind its drafts.
        needs_layer: False where mtp without a layer means suffix.
        model: checkpoint of draft_model, or of mtp's layer where that does not lie in the target's (None).
        quantization: format of that model's weights, or a mapping of parts to formats; None is the target's.
        revision: of that model on a hub; empty for the hub's default branch.
        notes: lines to show at start-up about keys accepted without effect.
    """

    method: str = "naive"
    num_speculative_tokens: int = 0
    verify_strategy: str = "topp"
    accept_policy: str = "normal"
    max_ngram_size: int = 5
    min_ngram_size: int = 2
    adaptive: bool = False
    suffix_decoding_max_tree_depth: int = 64
    suffix_decoding_max_cached_requests: int = -1
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_max_cache_bytes: int = 256 << 20
    num_model_steps: int = 1
    mtp_strategy: str = "default"
    model: str | None = None
    quantization: str | Mapping[str, str] | None = None
    revision: str = ""
    needs_layer: bool = True
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        low = 0 if self.method == "naive" else 1
        _check_int("num_speculative_tokens", self.num_speculative_tokens, low, MAX_SPECULATIVE_TOKENS)
        _check_int("max_ngram_size", self.max_ngram_size, 1, MAX_NGRAM_SIZE)
        _check_int("min_ngram_size", self.min_ngram_size, 1, self.max_ngram_size)
        _check_int("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 2, 255)
        _check_int("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, -1, 2**31)
        _check_number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0, 64)
        _check_number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0, 1)
        _check_int("suffix_decoding_max_cache_bytes", self.suffix_decoding_max_cache_bytes, 1 << 20, 1 << 34)
        _check_steps(self.num_model_steps, self.num_speculative_tokens if self.method == "mtp" else MAX_MODEL_STEPS)
        _check_choice("mtp_strategy", self.mtp_strategy, tuple(EXTENSIONS))
        if self.model is not None and not isinstance(self.model, str):
            raise ConfigError(f"{FIELD}.model", f"expected a folder, got {self.model!r}")
        if self.method == "draft_model" and not self.model:
            raise ConfigError(f"{FIELD}.model", "is missing; method 'draft_model' needs a checkpoint to draft with")
        if not isinstance(self.revision, str):
            raise ConfigError(f"{FIELD}.revision", f"expected a branch, tag or commit, got {self.revision!r}")
        _check_quantization(self.quantization)
        _check_choice("verify_strategy", self.verify_strategy, VERIFY_STRATEGIES)
        _check_choice("accept_policy", self.accept_policy, ACCEPT_POLICIES)
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"{FIELD}.adaptive", f"expected true or false, got {self.adaptive!r}")
        if self.adaptive and not _can_adapt(self.method, self.verify_strategy, self.accept_policy):
            message = "needs a method that drafts, accept_policy normal and a verify_strategy other than topp_relaxed"
            raise ConfigError(f"{FIELD}.adaptive", message)

    @property
    def is_lossy(self) -> bool:
        """True when the text may differ from plain decoding."""
        return self.verify_strategy == "topp_relaxed" or self.accept_policy == "accept_all"

    def to_mapping(self) -> dict[str, Any]:
        """Return the keys that belong to the method, with their values: what `from_mapping` makes this of."""
        hidden = {"notes", "needs_layer"} if self.needs_layer else {"notes", "needs_layer", "mtp_strategy"}
        parts = _parts(self.method, self.mtp_strategy)
        values = {key: value for key, value in asdict(self).items() if key not in hidden}
        return {key: value for key, value in values.items() if _belongs(key, parts)}

    @property
    def extension(self) -> str | None:
        """Return the method that goes on behind mtp's drafts, if any."""
        return EXTENSIONS[self.mtp_strategy] if self.method == "mtp" else None

    def without_layer(self) -> SpeculativeConfig:
        """Return what stays of mtp with suffix decoding where there is no layer."""
        return replace(self, method="suffix", mtp_strategy="default", num_model_steps=1, needs_layer=True)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | None) -> SpeculativeConfig:
        """Build from the user's mapping; None means no speculation.

        Raises:
            ConfigError: an unknown key (the nearest known one is named), a value outside its range, or a method or key
                that this version does not have.
        """
        if mapping is None:
            return cls()
        if not isinstance(mapping, Mapping):
            raise ConfigError(FIELD, f"expected a mapping, got {type(mapping).__name__}")
        method = _resolve_method(mapping)  # before the keys, most of which belong to a method
        given = _resolve_keys(mapping)
        is_suffix_meant = method == "mtp" and "mtp_strategy" not in given and any(map(_is_suffix_key, given))
        strategy = "with_suffix" if is_suffix_meant else given.get("mtp_strategy", "default")
        _check_choice("mtp_strategy", strategy, tuple(EXTENSIONS))
        _check_belongs(given, method, strategy)
        ranks = given.pop("draft_tensor_parallel_size", None)
        values: dict[str, Any] = {key: given[key] for key in KEYS if key in given and key != "method"}
        notes = tuple(f"speculative_config.{key} has no effect here" for key in KEYS_WITHOUT_EFFECT if key in mapping)
        if ranks is not None:
            notes += (_note_ranks(ranks),)
        can_adapt = _can_adapt(method, values.get("verify_strategy"), values.get("accept_policy"))
        values.setdefault("adaptive", can_adapt)
        if method == "naive":
            values["num_speculative_tokens"] = 0
        else:
            values.setdefault("num_speculative_tokens", DEFAULT_SPECULATIVE_TOKENS.get(method, 1))
        if method == "mtp":
            values |= {"mtp_strategy": strategy, "needs_layer": not is_suffix_meant}
            values.setdefault("num_model_steps", values["num_speculative_tokens"] if strategy == "default" else 1)
        if "max_ngram_size" in values and "min_ngram_size" not in values:
            _check_int("max_ngram_size", values["max_ngram_size"], 1, MAX_NGRAM_SIZE)
            values["min_ngram_size"] = min(2, values["max_ngram_size"])
        return cls(method=method, notes=notes, **values)


def _can_adapt(method: str, verify_strategy: Any, accept_policy: Any) -> bool:
    """True where the number of drafts, which follows measured times, cannot change the text; None is the default."""
    return method != "naive" and verify_strategy != "topp_relaxed" and accept_policy in (None, "normal")


def _resolve_keys(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with aliases replaced, or raise for a key that is unknown or not available."""
    given: dict[str, Any] = {}
    for key, value in mapping.items():
        name = KEY_ALIASES.get(key, key)
        if name in KEYS_WITHOUT_EFFECT or value is None:
            continue
        if name in REMOVED_KEYS:
            raise ConfigError(f"{FIELD}.{key}", REMOVED_KEYS[name])
        if name not in KEYS:
            known = difflib.get_close_matches(key, (*KEYS, *KEY_ALIASES), n=1)
            hint = f"; did you mean {known[0]!r}?" if known else f"; known keys: {', '.join(KEYS)}"
            raise ConfigError(f"{FIELD}.{key}", f"unknown key{hint}")
        if name in given:
            raise ConfigError(f"{FIELD}.{key}", f"given twice (it is another name of {name!r})")
        given[name] = value
    return given


def _resolve_method(given: Mapping[str, Any]) -> str:
    model = given.get("model")
    method = given.get("method") or (infer_method(model) if isinstance(model, str) and model else None)
    if not isinstance(method, str):
        raise ConfigError(f"{FIELD}.method", f"expected one of {', '.join(METHODS)}, got {method!r}")
    method = METHOD_ALIASES.get(method.lower(), method.lower())
    if method in PLANNED_METHODS:
        raise ConfigError(f"{FIELD}.method", f"{method!r} is not available yet; available: {', '.join(METHODS)}")
    return _check_choice("method", method, METHODS)


def _owners(key: str) -> tuple[str, ...]:
    """Return the methods that a key belongs to; none if it belongs to all of them."""
    return next((owners for prefix, owners in OWNERS_OF_KEYS.items() if key.startswith(prefix)), ())


def _belongs(key: str, parts: tuple[str, ...]) -> bool:
    owners = _owners(key)
    return not owners or not set(owners).isdisjoint(parts)


def _is_suffix_key(key: str) -> bool:
    return _owners(key) == ("suffix",)


def _parts(method: str, strategy: str) -> tuple[str, ...]:
    """Return the methods that draft."""
    extension = EXTENSIONS[strategy]
    return (method,) if extension is None else (method, extension)


def _check_belongs(given: Mapping[str, Any], method: str, strategy: str) -> None:
    parts = _parts(method, strategy)
    for key in given:
        if not _belongs(key, parts):
            named = " or ".join(map(repr, _owners(key)))
            raise ConfigError(f"{FIELD}.{key}", f"belongs to method {named}, the method is {method!r}")


def _note_ranks(value: Any) -> str:
    _check_int("draft_tensor_parallel_size", value, 1, 2**31)
    return f"{FIELD}.draft_tensor_parallel_size {value} has no effect: on the CPU one rank uses all cores"


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{FIELD}.{name}", f"expected an integer in [{low}, {high}], got {value!r}")


def _check_steps(steps: Any, num_drafts: int) -> None:
    _check_int("num_model_steps", steps, 1, MAX_MODEL_STEPS)
    if steps > num_drafts:
        raise ConfigError(f"{FIELD}.num_model_steps", f"{steps} steps make more than {num_drafts} speculative tokens")


def _check_quantization(value: Any) -> None:
    try:
        QuantizationConfig.from_value("none" if value is None else value)
    except ConfigError as error:
        raise ConfigError(f"{FIELD}.{error.field}", error.message) from None


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"{FIELD}.{name}", f"expected a number in [{low}, {high}], got {value!r}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ConfigError(f"{FIELD}.{name}", f"expected one of {', '.join(choices)}, got {value!r}")
    return str(value)
