# SPDX-License-Identifier: Apache-2.0
"""docs/guide/models.md and docs/guide/limits.md say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastdeploy.config.family_defaults import TRANSFORMERS
from fastdeploy.config.flags import FLAG_BY_NAME, FlagClass
from fastdeploy.config.rope_config import SUPPORTED_ROPE_KINDS
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.detokenize.tokenizer_files import SENTENCEPIECE_FILES
from fastdeploy.hub.clients import HUBS
from fastdeploy.spec_decode.proposers.registry import PROPOSERS

DOCS = Path(__file__).resolve().parent.parent / "docs" / "guide"
MODELS, LIMITS = ((DOCS / name).read_text() for name in ("models.md", "limits.md"))
WITHOUT_EFFECT = {"tensor_parallel_size", "trust_remote_code"}
PARTLY_HONOURED = {"cache_transfer_protocol", "scheduler_name"}  # the page names values that are refused


def test_models_page_names_every_architecture_rope_rule_hub_and_file() -> None:
    assert set(re.findall(r"`(\w+ForCausalLM)`", MODELS)) - {"Ernie4_5_ForCausalLM"} == set(TRANSFORMERS)
    for name in (*SUPPORTED_ROPE_KINDS, *HUBS, *(hub.package for hub in HUBS.values()), *SENTENCEPIECE_FILES):
        assert name in MODELS, name


def test_every_flag_of_the_limits_page_is_refused_or_has_no_effect() -> None:
    missing, _, request_limits = LIMITS.partition("## What a request may take")
    assert request_limits
    texts = missing.partition("## Texts")[0] + missing.partition("## Deployment")[2]
    flags = {name.replace("-", "_") for name in re.findall(r"`--([a-z-]+)`", texts)}
    assert len(flags) > 15
    for name in sorted(flags - PARTLY_HONOURED):
        expected = FlagClass.NO_EFFECT if name in WITHOUT_EFFECT else FlagClass.REFUSED
        assert FLAG_BY_NAME[name].flag_class is expected, name


def test_speculation_methods_of_the_limits_page_are_refused_and_no_other() -> None:
    text = LIMITS.partition("Speculation methods other than ")[2].partition(";")[0]
    there, missing = (re.findall(r"`(\w+)`", part) for part in text.split(":", 1))
    assert set(there) == set(PROPOSERS)
    for method in missing:
        with pytest.raises(ConfigError, match=f"'{method}' is not available yet"):
            parse_speculative_config({"method": method, "num_speculative_tokens": 2})
