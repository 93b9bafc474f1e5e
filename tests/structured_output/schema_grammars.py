# SPDX-License-Identifier: Apache-2.0
"""Forms compiled for single bytes, and the texts that they allow."""

from __future__ import annotations

from functools import cache
from typing import Any

import llguidance

from fastdeploy.core.guided_decoding import StructuredOutputsParams
from fastdeploy.structured_output.source import LIMITS, make_source


@cache
def byte_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def compile_form(**form: Any) -> llguidance.LLMatcher:
    source = make_source(StructuredOutputsParams(**form), {})
    matcher = llguidance.LLMatcher(byte_tokenizer(), source, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def allows(form: llguidance.LLMatcher, text: str) -> bool:
    """Return whether a text is a complete output."""
    matcher, tokens = form.deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def allowed_texts(texts: list[str], **form: Any) -> list[str]:
    """Return the texts that a form allows."""
    matcher = compile_form(**form)
    return [text for text in texts if allows(matcher, text)]
