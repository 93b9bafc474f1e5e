# SPDX-License-Identifier: Apache-2.0
"""The law of exactness holds for the codes of GGUF files: one plain text per file and format, whatever computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from msgspec import structs

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.config.speculative_config import DraftModelConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.engine.engine import Engine
from fastdeploy.gguf.folder import gguf_folder
from tests.exactness.engines import CHUNKS, NUM_DRAFTS, WAYS, Texts, build, check_speculation, config, exists
from tests.exactness.requests import run_alone
from tests.exactness.test_experts import NUM_BLOCKS, make_requests
from tests.gguf.gguf_files import gguf_path
from tests.gguf.rewritten import rewrite
from tests.pairwise import pairwise

LAYER = "blk.3."  # for multi-token prediction
REQUESTED = ("", "w8a8", "w4a8", "wint4", "none")  # "": what the file has
CACHES = ("auto", "int8")
Kinds = Callable[[str], str]


def mostly(kind: str, **others: str) -> Kinds:
    """Return the type of all tensors but those whose names begin with a key of `others`, or have it after a layer's."""
    return lambda name: next((other for part, other in others.items() if part in name), kind)


def with_layer(kind: str, decoder: Kinds) -> Kinds:
    """Return types of a model whose layer for multi-token prediction has another one."""
    return lambda name: kind if name.startswith(LAYER) else decoder(name)


# Name -> a file of tests/golden/gguf, and the types in which its tensors are written; None for its own.
FILES: dict[str, tuple[str, Kinds | None]] = {
    "q4_0": ("llama_f32", mostly("Q4_0", token_embd="Q8_0")),
    "q4_1": ("ernie4_5_q4_1", None),
    "q5_1-untied": ("llama_groups", mostly("Q5_1", output="Q8_0", token_embd="Q5_0")),
    "q8_0": ("qwen2_q8_0", None),
    "k": ("llama_k", None),
    "small-k": ("qwen3_q5_0", mostly("Q5_0", attn_v="Q8_0", ffn_down="Q5_1")),
    "experts": ("qwen3moe_groups", None),
    "experts-k": ("ernie4_5_moe_k", None),
    "mtp": ("glm4moe_mtp", with_layer("Q8_0", mostly("Q4_0", output="Q8_0"))),
    "mtp-q4_1": ("glm4moe_mtp", with_layer("Q4_1", mostly("Q5_0", output="Q6_K"))),
}
LAYERS = ("mtp", "mtp-q4_1")
METHODS = ("ngram", "suffix", "oracle", "draft_model")
CASES = [
    *pairwise(list(FILES), REQUESTED, CACHES, list(WAYS), METHODS, CHUNKS, NUM_DRAFTS),
    *pairwise(LAYERS, REQUESTED, CACHES, list(WAYS), ("mtp", "with_ngram"), CHUNKS, NUM_DRAFTS, allowed=exists),
]


class Folders:
    """The files and what is made from them, in a folder of the tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.target, self.draft = cache(self._target), cache(self._draft)
        self.plain_texts = cache(self._plain_texts)

    def _target(self, name: str) -> str:
        source, kinds = FILES[name]
        return str(gguf_folder(self._write(source, name, kinds) if kinds else gguf_path(source)))

    def _draft(self, name: str) -> str:
        return str(gguf_folder(self._write(FILES[name][0], f"{name}-draft", mostly("Q4_1"))))

    def _write(self, source: str, name: str, kinds: Kinds) -> Path:
        return rewrite(gguf_path(source), self._folder / f"{name}.gguf", kinds)

    def change(self, name: str, requested: str, kv_cache: str) -> Callable[[EngineConfig], EngineConfig]:
        """Return what makes the configuration of a test that of a file."""

        def changed(cfg: EngineConfig) -> EngineConfig:
            num_blocks = None if cfg.cache.num_blocks is None else NUM_BLOCKS
            threshold = min(cfg.scheduler.long_prefill_token_threshold, 64)
            speculative = cfg.speculative
            if isinstance(speculative, DraftModelConfig):
                speculative = structs.replace(speculative, model=self.draft(name))
            return replace(
                cfg,
                model=self.target(name),
                dtype="bfloat16",
                quantization=QuantizationConfig.from_value(requested) if requested else UNQUANTIZED,
                max_model_len=64,
                cache=replace(cfg.cache, num_blocks=num_blocks, dtype=kv_cache),
                scheduler=replace(cfg.scheduler, long_prefill_token_threshold=threshold),
                speculative=speculative,
            )

        return changed

    def engine(self, name: str, requested: str, kv_cache: str, cfg: EngineConfig) -> Engine:
        return build(self.change(name, requested, kv_cache)(cfg))

    def _plain_texts(self, name: str, requested: str, kv_cache: str) -> tuple[list[GenerationRequest], Texts]:
        """Return requests and their plain decoding, one request at a time."""
        requests = make_requests()
        return requests, run_alone(self.engine(name, requested, kv_cache, config()), requests)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    folder = tmp_path_factory.mktemp("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield Folders(folder)


@pytest.mark.parametrize(("name", "requested", "kv_cache", "way", "method", "chunk", "num_drafts"), CASES)
def test_speculation(
    folders: Folders, name: str, requested: str, kv_cache: str, way: str, method: str, chunk: int, num_drafts: int
) -> None:
    form = name, requested, kv_cache
    check_speculation(way, *folders.plain_texts(*form), method, chunk, num_drafts, folders.change(*form))
