# SPDX-License-Identifier: Apache-2.0
"""Configuration of speculation: one structure per method. docs/guide/speculation.md shows the help of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self, get_args

import msgspec
from msgspec.structs import force_setattr, replace

from fastdeploy.config.flag import check_fields, choice, flags_of, integer, number, switch, text
from fastdeploy.config.quantization import quantization_format
from fastdeploy.core.errors import ConfigError

FIELD = "speculative_config"
MAX_DRAFTS = 16
MAX_NGRAM_SIZE = 16
_DERIVED: Any = None  # set from other fields, unless it is given
_NumDrafts = Annotated[
    int, integer(1, MAX_DRAFTS, help="K, the maximum number of drafts verified per step and request")
]


class SpeculativeConfig(msgspec.Struct, frozen=True, tag_field="method"):
    """What all methods have; `notes` are lines to show at start-up about keys without effect."""

    num_speculative_tokens: _NumDrafts = 1
    adaptive: Annotated[
        bool, switch(help="choose the number of drafts by measured speed (default: true where lossless)")
    ] = _DERIVED
    verify_strategy: Annotated[
        str, choice("topp", "target_match", "greedy", "topp_relaxed", help="see [Verification](#verification)")
    ] = "topp"
    accept_policy: Annotated[
        str, choice("normal", "accept_all", "reject_all", help="other values than `normal` are for measuring speed")
    ] = "normal"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        can_adapt = self.method != "naive" and self.verify_strategy != "topp_relaxed" and self.accept_policy == "normal"
        self._set_default("adaptive", can_adapt)
        check_fields(self, f"{FIELD}.")
        if self.adaptive and not can_adapt:
            message = "needs a method that drafts, accept_policy normal and a verify_strategy other than topp_relaxed"
            raise ConfigError(f"{FIELD}.adaptive", message)

    def _set_default(self, name: str, default: Any) -> None:
        """Set a field whose default depends on other fields, unless it was given."""
        if getattr(self, name) is None:
            force_setattr(self, name, default)

    def _check_at_most(self, name: str, limit_name: str) -> None:
        value, limit = getattr(self, name), getattr(self, limit_name)
        if value > limit:
            raise ConfigError(f"{FIELD}.{name}", f"expected at most {limit_name} {limit}, got {value}")

    @property
    def method(self) -> str:
        """Return the name of the method."""
        return str(self.__struct_config__.tag)

    @property
    def extension(self) -> SpeculativeConfig | None:
        """Return the configuration of the method that extends the drafts of this one, if any."""
        return None

    @property
    def can_match(self) -> bool:
        """Return whether drafts can come from matches in earlier text, alone or after those of a model."""
        return self.extension is not None or self.method in ("ngram", "suffix")

    @property
    def is_lossy(self) -> bool:
        """Return whether the text may differ from plain decoding."""
        return self.verify_strategy == "topp_relaxed" or self.accept_policy == "accept_all"

    def to_mapping(self) -> dict[str, Any]:
        """Return the user's keys and their values; parsed, they give an equal configuration."""
        return {"method": self.method, **{key: getattr(self, key) for key in flags_of(type(self))}}


class NaiveConfig(SpeculativeConfig, frozen=True, tag="naive"):
    """Plain decoding."""

    num_speculative_tokens: Annotated[int, integer(0, 0)] = 0


class NgramConfig(SpeculativeConfig, frozen=True, tag="ngram"):
    """N-gram matching."""

    num_speculative_tokens: _NumDrafts = 16
    max_ngram_size: Annotated[int, integer(1, MAX_NGRAM_SIZE, help="longest match; also `prompt_lookup_max`")] = 5
    min_ngram_size: Annotated[
        int,
        integer(1, MAX_NGRAM_SIZE, help="shortest match, at most the longest; also `prompt_lookup_min` (default: 2)"),
    ] = _DERIVED

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_default("min_ngram_size", min(2, self.max_ngram_size))
        self._check_at_most("min_ngram_size", "max_ngram_size")


class SuffixDecodingConfig(SpeculativeConfig, frozen=True, tag="suffix"):
    """Suffix decoding."""

    num_speculative_tokens: _NumDrafts = 16
    suffix_decoding_max_tree_depth: Annotated[
        int, integer(2, 255, help="tokens of a match and its continuation together")
    ] = 64
    suffix_decoding_max_cached_requests: Annotated[
        int, integer(-1, 2**31, help="maximum number of cached outputs; 0: none; -1: as many as fit")
    ] = -1
    suffix_decoding_max_cache_bytes: Annotated[int, integer(2**20, 2**34, help="memory for cached outputs")] = 2**28
    suffix_decoding_max_spec_factor: Annotated[
        float, number(0, 64, help="a match of m tokens drafts at most m * factor tokens")
    ] = 1.0
    suffix_decoding_min_token_prob: Annotated[
        float, number(0, 1, help="a draft ends where its probability is lower")
    ] = 0.1


class ModelBasedConfig(SpeculativeConfig, frozen=True):
    """What methods with a drafting model have.

    `extension` appends to the model's drafts. With `has_default_k`, the model's files may say the number of drafts.
    """

    num_speculative_tokens: Annotated[
        int,
        integer(1, MAX_DRAFTS, help="K, the maximum number of drafts verified per step and request"),
    ] = _DERIVED
    model: Annotated[
        str | None,
        text("a directory or a name on a hub", help="the drafting model (default of `mtp`: the target's own layer)"),
    ] = None
    num_model_steps: Annotated[
        int,
        integer(1, MAX_DRAFTS, help="draft passes per step, at most K (default: K; 1 with an extension)"),
    ] = _DERIVED
    quantization: Annotated[
        str | Mapping[str, str] | None, quantization_format(help="format of the drafting model's weights")
    ] = None
    revision: Annotated[
        str, text("a branch, tag or commit", help="version of a model on a hub (default: its main branch)")
    ] = ""
    gguf_file: Annotated[
        str, text("a name", help="GGUF file of a directory or of a model on a hub (default: the only one)")
    ] = ""
    draft_tensor_parallel_size: Annotated[int | None, integer(1, help="no effect on the CPU")] = None
    extension: NgramConfig | SuffixDecodingConfig | None = None
    has_default_k: bool = False

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is None:
            force_setattr(self, "has_default_k", True)
            force_setattr(self, "num_speculative_tokens", 1)
        self._set_default("num_model_steps", self.num_speculative_tokens if self.extension is None else 1)
        super().__post_init__()
        self._check_at_most("num_model_steps", "num_speculative_tokens")

    def with_drafts(self, count: int) -> Self:
        """Return the configuration with this number of drafts; as many draft passes if no extension fills the rest."""
        if self.extension is None:
            return replace(self, num_speculative_tokens=count, num_model_steps=count, has_default_k=False)
        extension = replace(self.extension, num_speculative_tokens=count)
        steps = min(self.num_model_steps, count)
        return replace(
            self, num_speculative_tokens=count, num_model_steps=steps, extension=extension, has_default_k=False
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the user's keys and their values, with those of the extension."""
        if self.extension is None:
            values = super().to_mapping()
        else:
            values = {**self.extension.to_mapping(), **super().to_mapping()}
            values["mtp_strategy"] = f"with_{self.extension.method}"
        if self.has_default_k:
            del values["num_speculative_tokens"], values["num_model_steps"]
        return values


class MTPConfig(ModelBasedConfig, frozen=True, tag="mtp"):
    """Multi-token prediction. If `needs_layer` is False, the extension drafts alone where there is no layer."""

    mtp_hidden_state: Annotated[
        str,
        choice("normed", "raw", help="see [The state that an MTP layer reads](#the-state-that-an-mtp-layer-reads)"),
    ] = "normed"
    needs_layer: bool = True

    def to_mapping(self) -> dict[str, Any]:
        """Return the user's keys and their values, with those of the extension."""
        values = {"mtp_strategy": "default", **super().to_mapping()}
        if not self.needs_layer:
            del values["mtp_strategy"]
        return values


class OtherModelConfig(ModelBasedConfig, frozen=True):
    """What methods have whose drafting model is never a part of the target."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            kind = "a draft model" if self.method == "draft_model" else "a trained head"
            raise ConfigError(f"{FIELD}.model", f"is missing; method {self.method!r} needs {kind}")


class DraftModelConfig(OtherModelConfig, frozen=True, tag="draft_model"):
    """A draft model."""


class EagleConfig(OtherModelConfig, frozen=True, tag="eagle"):
    """A head of EAGLE or EAGLE-2, which have the same files."""


class Eagle3Config(OtherModelConfig, frozen=True, tag="eagle3"):
    """A head of EAGLE-3."""


class MLPSpeculatorConfig(OtherModelConfig, frozen=True, tag="mlp_speculator"):
    """An MLP speculator."""


class MedusaConfig(OtherModelConfig, frozen=True, tag="medusa"):
    """Medusa's heads."""


class UnknownMethodConfig(OtherModelConfig, frozen=True, tag="by_files"):
    """A drafting model on a hub, whose files will say the method; `given` is the user's mapping."""

    given: Mapping[str, Any] = {}

    def to_mapping(self) -> dict[str, Any]:
        """Return the user's mapping."""
        return dict(self.given)


TrainedHeadConfig = EagleConfig | Eagle3Config | MLPSpeculatorConfig | MedusaConfig
AnyOtherModel = DraftModelConfig | TrainedHeadConfig | UnknownMethodConfig
MethodConfig = NaiveConfig | NgramConfig | SuffixDecodingConfig | MTPConfig | DraftModelConfig | TrainedHeadConfig
AnySpeculativeConfig = MethodConfig | UnknownMethodConfig
CONFIGS: dict[str, type[MethodConfig]] = {
    str(config.__struct_config__.tag): config for config in get_args(MethodConfig)
}
METHODS = tuple(CONFIGS)
EXTENSIONS = {"default": None, "with_ngram": NgramConfig, "with_suffix": SuffixDecodingConfig}  # by mtp_strategy
