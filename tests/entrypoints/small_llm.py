# SPDX-License-Identifier: Apache-2.0
"""An `LLM` on the smallest model with golden values, whose tokens are characters, for tests with many calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import fastdeploy
from fastdeploy import LLM

GOLDEN = Path(fastdeploy.__file__).parents[1] / "tests" / "golden"
TEMPLATE = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"


def save_small_model(folder: Path, golden: str = "ernie4_5_bias") -> Path:
    """Fill `folder` with links to a model's files and a tokenizer: one token per printable ASCII character."""
    for file in (GOLDEN / golden).iterdir():
        (folder / file.name).symlink_to(file)
    tokens = ["<unk>", "<s>", "</s>", *map(chr, range(32, 127))]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(tokens[:3])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load_small_model(folder: Path, golden: str = "ernie4_5_bias", **kwargs: Any) -> LLM:
    """Load a model with few and small blocks, so that prefixes are shared and requests preempted."""
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    values = {"block_size": 16, "num_gpu_blocks_override": 12, "speculative_config": speculative, "seed": 1, **kwargs}
    return LLM(str(save_small_model(folder, golden)), **values)


def assert_empty(llm: LLM) -> None:
    """Assert that the engine has no request, and that all blocks are free."""
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    assert not llm.engine.has_unfinished()
    llm.engine.check_integrity()
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


@contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object in the block."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)
