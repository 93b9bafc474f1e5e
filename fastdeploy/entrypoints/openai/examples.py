# SPDX-License-Identifier: Apache-2.0
"""The examples of the OpenAPI document, which /docs sends when "Try it out" is pressed.

Every endpoint with a body has a row; each works with any model, and answers within a few seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QUESTION = "How do plants make their food?"
_CODE = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):"
_MESSAGES = [{"role": "user", "content": _QUESTION}]

BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"model": "default", "prompt": _CODE, "max_tokens": 32, "temperature": 0.6, "seed": 2},
    "/v1/chat/completions": {"model": "default", "messages": _MESSAGES, "max_tokens": 32, "temperature": 0},
    "/v1/chat/completions/batch": {
        "model": "default",
        "messages": [_MESSAGES, [{"role": "user", "content": "Name three trees."}]],
        "max_tokens": 32,
        "temperature": 0,
    },
    "/invocations": {"model": "default", "messages": _MESSAGES, "max_tokens": 32, "temperature": 0},
    "/v1/messages": {"model": "default", "messages": _MESSAGES, "max_tokens": 32, "temperature": 0},
    "/v1/messages/count_tokens": {"model": "default", "messages": _MESSAGES},
    "/v1/responses": {"model": "default", "input": _QUESTION, "max_output_tokens": 32, "temperature": 0},
    "/tokenize": {"model": "default", "prompt": _QUESTION},
    "/detokenize": {"model": "default", "tokens": [72, 101, 108]},
    "/v1/abort_requests": {"req_ids": ["my-request"]},
    "/v1/role": {"role": "mixed"},
}
"""Path of an endpoint -> a body that it answers with status 200; /v1/role does so on a node that works with others."""

PATH_PARAMETERS: Mapping[str, str] = {"name": "default"}
"""Name in the path of an endpoint -> a value that it answers with status 200."""
