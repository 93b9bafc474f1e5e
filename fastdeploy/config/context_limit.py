# SPDX-License-Identifier: Apache-2.0
"""How many tokens of prompt and output together a request may have."""

from __future__ import annotations

from typing import Literal, NamedTuple

ContextLength = int | Literal["auto"]
"""Value of `--max-model-len`: tokens, or `auto` for as many as possible."""


class ContextLimit(NamedTuple):
    """A number of tokens of prompt and output, and what limits it; no reason for the model's own limit."""

    num_tokens: int
    reason: str = ""
