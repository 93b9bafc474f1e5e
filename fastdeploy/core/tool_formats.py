# SPDX-License-Identifier: Apache-2.0
"""Formats of tool calls, by the names of `--tool-call-parser`."""

from __future__ import annotations

AUTO = "auto"
"""The value of `--tool-call-parser` that finds the format in the chat template."""

TOOL_CALL_FORMATS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
    "llama3_json": "llama3_json",
    "llama4_json": "llama3_json",
    "pythonic": "pythonic",
    "llama4_pythonic": "pythonic",
    "glm45": "glm45",
    "glm47": "glm45",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "deepseek": "deepseek_v31",
    "deepseek-r1": "deepseek_v3",
    "deepseek-v3-0324": "deepseek_v3",
    "deepseek-v3.1": "deepseek_v31",
    "ernie-x1": "ernie",
    "ernie_x1": "ernie",
    "ernie-45-vl-thinking": "ernie",
    "ernie_45-vl-thinking": "ernie",
    "ernie45": "ernie",
}
"""Name -> format; includes the spellings of FastDeploy and vLLM. The formats are in `parsers/registry.py`."""
