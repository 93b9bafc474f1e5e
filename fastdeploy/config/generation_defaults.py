# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters that a checkpoint proposes in generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastdeploy.core.errors import ConfigError, InvalidRequestError
from fastdeploy.core.sampling_params import OUTPUT_LENGTHS, RANGES


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling parameters of generation_config.json; None for those that it omits."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def sampling_values(self) -> dict[str, Any]:
        """Return arguments of `SamplingParams`; do_sample false means temperature 0."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.max_new_tokens is not None:
            values["max_tokens"] = self.max_new_tokens
        if self.do_sample is False:
            values["temperature"] = 0.0
        return values


def parse_generation_defaults(raw: Mapping[str, Any], where: str) -> GenerationDefaults:
    """Read the parameters; `where` is the file, as messages begin with it.

    Raises:
        ConfigError: a value has another type or is out of range; names the key.
    """
    values = {name: raw.get(name) for name in GenerationDefaults.__dataclass_fields__}
    for name, value in values.items():
        limits = OUTPUT_LENGTHS if name == "max_new_tokens" else RANGES.get(name)
        if value is not None and limits is not None:
            try:
                limits.check(name, value)
            except InvalidRequestError as error:
                raise ConfigError(name, f"{where}{error.message:.300}") from None
    if values["do_sample"] is None:  # PaddleNLP names the strategy instead
        values["do_sample"] = {"greedy_search": False, "sampling": True}.get(str(raw.get("decode_strategy")))
    return GenerationDefaults(**values)
