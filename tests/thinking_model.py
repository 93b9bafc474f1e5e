# SPDX-License-Identifier: Apache-2.0
"""The demonstration model with tokens that its texts do not use renamed to the marks of reasoning and tool calls."""

from __future__ import annotations

from pathlib import Path

from fastdeploy.hub.model_path import resolve_model_path

START, END, CALL_START = 3, 7, 4  # ids of <think>, </think> and <tool_call>
RENAMED = {"<|system|>": "<think>", "<|reserved|>": "</think>", "<|user|>": "<tool_call>"}


def save_thinking_model(folder: Path) -> Path:
    """Fill `folder` with links to the model's files and a tokenizer that knows the marks."""
    for file in Path(resolve_model_path("demo")).iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    text = (Path(resolve_model_path("demo")) / "tokenizer.json").read_text()
    for old, new in RENAMED.items():
        text = text.replace(old, new)
    (folder / "tokenizer.json").write_text(text)
    return folder
