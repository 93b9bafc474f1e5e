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
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.config.speculative_config import DraftModelConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.request import GenerationRequest
from fastdeploy.engine.engine import Engine
from fastdeploy.gguf.folder import gguf_folder
from fastdeploy.models.packing import pack_checkpoint
from tests.exactness.engines import CHUNKS, NUM_DRAFTS, Texts, build, check_drafts, check_speculation, config, exists
from tests.exactness.golden_models import NUM_BLOCKS, make_requests
from tests.exactness.requests import run_all, run_alone
from tests.gguf.gguf_files import gguf_path
from tests.gguf.rewritten import rewrite
from tests.models.model_driver import GOLDEN
from tests.pairwise import pairwise

LAYER = "blk.3."  # for multi-token prediction
REQUESTED = ("", "w8a8", "w4a8", "wint4", "none")  # "": what the file has
CACHES = ("auto", "int8")
NUM_REQUESTS = 8
Kinds = Callable[[str], str]


def mostly(kind: str, **others: str) -> Kinds:
    """Return the type of all tensors but those that have a key of `others` in their names."""
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
    "experts-k": ("ernie4_5_moe_k", None),
    "mtp": ("glm4moe_mtp", with_layer("Q8_0", mostly("Q4_0", output="Q8_0"))),
    "mtp-q4_1": ("glm4moe_mtp", with_layer("Q4_1", mostly("Q5_0", output="F16"))),
}
LAYERS = ("mtp", "mtp-q4_1")
METHODS = ("ngram", "suffix", "oracle", "draft_model")
TOGETHER = ("together", "prefix-hits-together", "preemption", "preemption-prefix-caching")
CASES = [
    *pairwise([name for name in FILES if name not in LAYERS], REQUESTED, CACHES, TOGETHER, METHODS, CHUNKS, NUM_DRAFTS),
    *pairwise(LAYERS, REQUESTED, CACHES, TOGETHER, ("mtp", "with_ngram"), CHUNKS, NUM_DRAFTS, allowed=exists),
]


def some_requests() -> list[GenerationRequest]:
    """Return requests with each way to sample, whose prompts repeat a phrase."""
    return make_requests()[:NUM_REQUESTS]


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
        requests = some_requests()
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


@pytest.mark.parametrize("name", FILES)
def test_batching_and_chunking(folders: Folders, name: str) -> None:
    requests, plain = folders.plain_texts(name, "", "auto")
    assert run_all(folders.engine(name, "", "auto", config(chunk=7)), requests) == plain


def test_texts_are_those_of_the_form_and_not_of_another_one(folders: Folders) -> None:
    texts = [repr(folders.plain_texts("k", requested, "auto")[1]) for requested in REQUESTED]
    assert len(set(texts)) == len(REQUESTED)
    (named,) = (run_alone(folders.engine("k", "gguf", "auto", config()), some_requests()),)
    assert repr(named) == texts[0]


@pytest.mark.parametrize(
    ("name", "requested"),
    [
        ("q4_1", ""),
        ("q5_1-untied", "w8a8"),
        ("k", "wint4"),
        ("experts-k", "w4a8"),
        ("mtp", ""),
        ("mtp-q4_1", "w4a8"),
    ],
)
def test_a_packed_folder_has_the_texts_of_the_file(folders: Folders, name: str, requested: str, tmp_path: Path) -> None:
    requests, plain = folders.plain_texts(name, requested, "int8")
    method = "mtp" if name in LAYERS else "ngram"
    cfg = folders.change(name, requested, "int8")(config(method, 3, chunk=7))
    pack_checkpoint(ModelConfig.from_pretrained(cfg.model, dtype=cfg.dtype), tmp_path / "packed", cfg.quantization)
    file, packed = build(cfg), build(replace(cfg, model=str(tmp_path / "packed"), quantization=UNQUANTIZED))
    assert run_all(packed, requests) == plain
    check_drafts(packed, method, 3)
    assert packed.describe()["fingerprint"] == file.describe()["fingerprint"]
    assert packed.describe()["weights_bytes"] == file.describe()["weights_bytes"]


@pytest.mark.parametrize(
    ("target", "draft", "quantization", "dtype"),
    [
        ("q8_0", "q8_0", "", "bfloat16"),
        ("q8_0", "q8_0", "", "float32"),  # widens the codes of both
        ("k", "q4_0", "", "bfloat16"),
        ("k", "q4_0", "none", "bfloat16"),
        ("experts-k", "q4_1", "w8a8", "bfloat16"),
        ("glm4_moe", "mtp", "", "bfloat16"),
        ("mtp", "glm4_moe", "", "bfloat16"),
        ("mtp", "glm4_moe", "wint8", "bfloat16"),
    ],
)
def test_files_and_checkpoints_draft_for_each_other(
    folders: Folders, target: str, draft: str, quantization: str, dtype: str
) -> None:
    assert {target, draft} - {"glm4_moe"} <= set(FILES)

    def path(name: str) -> str:
        return str(GOLDEN / name) if name not in FILES else folders.target(name)

    keys = {"method": "draft_model", "model": path(draft), "num_speculative_tokens": 3, "adaptive": False}
    cfg = replace(folders.change("q4_0", quantization, "auto")(config()), model=path(target), dtype=dtype)
    requests = some_requests()
    plain = run_alone(build(cfg), requests)
    engine = build(replace(cfg, speculative=parse_speculative_config(keys)))
    assert run_all(engine, requests) == plain
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0 and (target == draft or stats.num_draft_tokens > stats.num_accepted_tokens)


@pytest.mark.parametrize(
    ("target", "layer", "quantization"),
    [
        ("glm4_moe", "mtp", None),
        ("mtp", "glm4_moe_mtp", None),
        ("mtp", "mtp-q4_1", None),
        ("mtp", "mtp-q4_1", "gguf"),
        ("mtp-q4_1", "mtp", "w4a8"),
        ("mtp", "mtp", "none"),
        ("mtp", "mtp", {"attention": "gguf", "mlp": "w8a8", "experts": "gguf", "head": "wint4"}),
    ],
)
def test_layers_of_another_file_or_in_other_formats_draft_for_a_target(
    folders: Folders, target: str, layer: str, quantization: str | dict[str, str] | None
) -> None:
    def path(name: str) -> str:
        return str(GOLDEN / name) if name not in FILES else folders.target(name)

    keys = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False, "quantization": quantization}
    keys |= {} if layer == target else {"model": path(layer)}
    cfg = replace(folders.change(target if target in FILES else "mtp", "", "auto")(config()), model=path(target))
    requests = some_requests()
    engine = build(replace(cfg, speculative=parse_speculative_config(keys)))
    assert run_all(engine, requests) == run_alone(build(cfg), requests)
    check_drafts(engine, "mtp", 3)


def test_codes_that_neither_target_nor_layer_has_cannot_be_asked_for(folders: Folders) -> None:
    keys = {"method": "mtp", "num_speculative_tokens": 3, "quantization": "gguf"}
    cfg = replace(config(), model="demo", speculative=parse_speculative_config(keys))
    with pytest.raises(ConfigError, match=r"gguf: .* has no weights that are quantized so") as caught:
        build(cfg)
    assert caught.value.field == "speculative_config.quantization"
