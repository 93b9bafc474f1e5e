# SPDX-License-Identifier: Apache-2.0
"""On a GPU, the codes of GGUF files give the texts that they give on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.gguf.folder import gguf_folder
from tests.engine.gpu.cells import Cell, config_of, requests_of
from tests.engine.gpu.small_model import write_gguf_model
from tests.engine.gpu.test_gpu_engine import Worker
from tests.exactness.requests import run_alone

MIXED = {
    "attn_q": "Q4_0",
    "attn_k": "Q5_0",
    "attn_v": "Q8_0",
    "ffn_gate": "Q4_1",
    "ffn_up": "Q5_1",
    "token_embd": "Q4_1",
}


def mixed(name: str) -> str:
    """Return a type with another one beside it in the same layer."""
    return MIXED.get(name.removesuffix(".weight").split(".")[-1], "Q4_0")


MODELS: dict[str, tuple[Callable[[str], str], bool]] = {"mixed": (mixed, False), "tied": (lambda name: "Q8_0", True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with a folder for each model and its draft model, as `cells` takes it."""
    folder = tmp_path_factory.mktemp("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for name, (kind_of, is_tied) in MODELS.items():
            (folder / name).mkdir()
            target = write_gguf_model(folder / f"{name}.gguf", kind_of, is_tied=is_tied)
            draft = write_gguf_model(folder / f"{name}-draft.gguf", lambda _: "Q8_0", seed=1, is_tied=is_tied)
            (folder / name / "target").symlink_to(gguf_folder(target))
            (folder / name / "draft_model").symlink_to(gguf_folder(draft))
        yield folder


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("mixed", Cell("draft_model", quantization="gguf")),
        ("tied", Cell("ngram", quantization="w8a8", kv_cache_dtype="int8")),
    ],
    ids=["mixed", "tied"],
)
def test_codes_have_the_texts_of_a_cpu(name: str, cell: Cell, folder: Path) -> None:
    plain = Cell(quantization=cell.quantization, kv_cache_dtype=cell.kv_cache_dtype)
    expected = run_alone(make_engine(config_of(plain, folder / name, device="cpu")), requests_of(cell))
    with closing(Worker(folder / name)) as worker:
        answer = worker.ask(cell)
    assert answer.error == "" and answer.is_exact
    assert answer.texts == [list(text.token_ids) for text in expected.values()]
    assert answer.num_accepted_tokens > 0
