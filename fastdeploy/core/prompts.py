# SPDX-License-Identifier: Apache-2.0
"""Types of the prompts that the offline `LLM` takes, for callers that name them; plain mappings work as well."""

from __future__ import annotations

from typing import TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
