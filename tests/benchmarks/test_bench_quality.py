# SPDX-License-Identifier: Apache-2.0
"""bench_quality compares formats on the same tokens; its figures have the values that their definitions say."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax as exact_log_softmax
from scipy.stats import entropy, sem

from benchmarks import bench_quality, quality_texts
from benchmarks.quality_figures import Figures, log_softmax
from benchmarks.quality_texts import WINDOW, Text, demo_texts, digest, installed_texts, texts_of_files
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.gguf.folder import gguf_folder
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.models.files import open_files
from tests.gguf.gguf_files import gguf_path

Run = Callable[..., dict[str, Any]]
PEERS = Path(__file__).resolve().parents[2] / "benchmarks/peers"
FAKE_PEER = """
import sys
import numpy as np
from protocol import answer_jobs

def answer(job):
    rows = len(job["token_ids"]) - 1
    np.save(job["file"], np.zeros((rows, 4096), np.float32))
    return {}

answer_jobs({"ready": "a peer", "weights_mib": len(sys.argv[-1])}, answer)
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.py"
    file.write_text("import os\n\n\ndef size(path):\n    return os.stat(path).st_size  # naïve\n" * 2, encoding="utf-8")
    return file


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: Path) -> Run:
    """Return a function that scores the text with the demonstration model and returns the command's JSON line."""

    def command(*flags: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["bench_quality", "--texts", str(text), "--formats", "wint8", "wint4", *flags])
        bench_quality.main()
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    return command


@pytest.fixture(scope="module", autouse=True)
def corpus_is_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality_texts, "read_corpus", functools.cache(quality_texts.read_corpus))
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(resolve_model_path("demo"))


def test_formats_are_compared_with_float32_and_the_cache_with_bf16(run: Run, tokenizer: Tokenizer, text: Path) -> None:
    found = run("--mixes")
    rows = {row["format"]: row for row in found["results"]}
    assert [(name, row["over"]) for name, row in rows.items()] == [
        ("float32", "float32"),
        ("bf16", "float32"),
        ("int8 cache", "bf16"),
        ("wint8", "float32"),
        ("wint4", "float32"),
        ("wint4, head too", "float32"),
    ]
    assert rows["float32"]["kl"] == rows["float32"]["change"] == 0 and rows["float32"]["same_token"] == 1
    assert 0 < rows["bf16"]["kl"] < rows["wint4"]["kl"] and 0 < rows["wint8"]["change"] < rows["wint4"]["change"]
    for name in ("bf16", "wint8", "wint4"):
        ratio = rows[name]["perplexity"] / rows["float32"]["perplexity"]
        assert rows[name]["worse_%"] == pytest.approx(100 * (ratio - 1), abs=1e-9)
    assert rows["float32"]["weights_mib"] == 2 * rows["bf16"]["weights_mib"] > 4 * rows["wint4"]["weights_mib"]
    texts = texts_of_files(tokenizer, [text], 1000)
    assert found["texts"] == ["text.py"] and found["digest"] == digest(texts)
    assert found["tokens"] == len(tokenizer.encode(text.read_text(encoding="utf-8")))


def test_a_peer_scores_the_same_tokens(run: Run, tmp_path: Path) -> None:
    (tmp_path / "peer.py").write_text(FAKE_PEER)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{PEERS}" exec "{sys.executable}" "{tmp_path}/peer.py" "$@"\n')
    python.chmod(0o755)
    rows = {row["format"]: row for row in run("--formats", "wint8", "--peers-python", str(python))["results"]}
    assert list(rows)[-3:] == ["llama.cpp Q8_0", "llama.cpp Q4_0", "llama.cpp Q4_1"]
    assert rows["llama.cpp Q4_0"]["perplexity"] == pytest.approx(4096)
    assert rows["llama.cpp Q4_0"]["over"] == "float32" and rows["llama.cpp Q4_0"]["kl"] > 1
    assert rows["llama.cpp Q4_0"]["weights_mib"] == len("q4_0"), "the peer is told its type"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "--texts: expected at least two tokens"),
        (b"\xff", "--texts: 'utf-8' codec can't decode"),
        (None, "--texts: [Errno 2] No such file or directory"),
    ],
)
def test_a_file_that_is_no_text_is_refused(
    run: Run, text: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    text.unlink()
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(SystemExit):
        run()
    assert message in capsys.readouterr().err


def test_peers_are_refused_for_a_model_whose_gguf_file_cannot_be_written(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_quality, "ARCHITECTURES", {"LlamaForCausalLM": "llama"})
    with pytest.raises(SystemExit):
        run("--peers-python", sys.executable)
    assert "--peers-python: expected one of LlamaForCausalLM, got Ernie4_5ForCausalLM" in capsys.readouterr().err


def test_figures_follow_their_definitions() -> None:
    random = np.random.default_rng(0)
    logits = [random.normal(0, 3, (2, rows, 50)).astype(np.float32) for rows in (70, 4)]
    next_ids = [random.integers(50, size=len(pair[0])) for pair in logits]
    figures = Figures()
    for pair, ids in zip(logits, next_ids):
        figures.add(log_softmax(pair[0].copy()), log_softmax(pair[1].copy()), ids)
    exact = [exact_log_softmax(pair.astype(np.float64), axis=-1) for pair in logits]
    reference, own = np.concatenate(exact, axis=1)
    chosen = np.arange(74), np.concatenate(next_ids)
    changes = np.abs(own[chosen] - reference[chosen])
    assert figures.row() == pytest.approx(
        {
            "perplexity": np.exp(-own[chosen].mean()),
            "worse_%": 100 * (np.exp(-own[chosen].mean()) / np.exp(-reference[chosen].mean()) - 1),
            "error_%": 100 * sem((own - reference)[chosen], ddof=0),
            "change": changes.mean(),
            "change_99%": np.quantile(changes, 0.99),
            "kl": entropy(np.exp(reference), np.exp(own), axis=-1).mean(),
            "same_token": (own.argmax(-1) == reference.argmax(-1)).mean(),
        },
        rel=1e-5,
    )


def test_a_real_model_scores_four_kinds_of_text_in_alternation(tokenizer: Tokenizer) -> None:
    texts = installed_texts(tokenizer, 6000)
    lengths = [len(text.token_ids) for text in texts]
    assert sum(lengths) >= 6000 > sum(lengths[:-1]) and max(lengths) == WINDOW
    names = [text.name for text in texts]
    assert names[1].startswith("pydoc_data: ") and names[2].endswith(".py") and names[3].startswith("docs/")
    assert names[5].startswith("pydoc_data: ") and len(set(names)) == len(names)
    assert digest(texts) == digest(installed_texts(tokenizer, 6000)) != digest(texts[:-1])


def test_the_demonstration_model_scores_beginnings_of_files_that_it_was_not_trained_on(tokenizer: Tokenizer) -> None:
    texts = demo_texts(tokenizer, 3000)
    assert len(texts) >= 3 and all(text.name.endswith(".py") and len(text.token_ids) <= WINDOW for text in texts)


def test_parts_of_a_file_are_the_whole_file_and_each_begins_with_the_added_tokens(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text("One two three 456.\n" * 400)
    texts = texts_of_files(tokenizer, [tmp_path / "long.txt"], 10**6)
    added = tokenizer.encode("")
    assert added and all(text.token_ids[: len(added)] == added for text in texts)
    assert [text.name for text in texts[:2]] == ["long.txt", f"long.txt, from token {WINDOW - len(added)}"]
    rest = [token for text in texts for token in text.token_ids[len(added) :]]
    assert tokenizer.decode(rest) == "One two three 456.\n" * 400


def test_the_digest_covers_names_and_tokens() -> None:
    texts = [Text("a", [1, 2]), Text("b", [3])]
    others = ([Text("a", [1, 2]), Text("b", [4])], [Text("a", [1, 2]), Text("c", [3])], [Text("a", [1, 2, 3])])
    assert len({digest(texts), *map(digest, others)}) == 4


def test_a_gguf_file_is_scored_as_it_is_stored_and_other_formats_begin_with_its_values_in_bf16(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = gguf_path("llama_groups")
    rows = {row["format"]: row for row in run("--model", str(path))["results"]}
    assert [(name, row["over"]) for name, row in rows.items()] == [
        ("float32", "float32"),
        ("bf16", "float32"),
        ("int8 cache", "bf16"),
        ("as stored", "float32"),
        ("wint8", "float32"),
        ("wint4", "float32"),
    ]
    assert 0 < rows["as stored"]["kl"] < rows["wint4"]["kl"]
    assert rows["as stored"]["weights_mib"] < rows["bf16"]["weights_mib"] == rows["float32"]["weights_mib"] / 2
    assert list(bench_quality.peers(is_gguf=True)) == ["as_stored", "q8_0", "q4_0", "q4_1"]
    assert list(bench_quality.peers(is_gguf=False)) == ["q8_0", "q4_0", "q4_1"]


def test_a_checkpoint_in_bf16_holds_the_values_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "plain").mkdir()
    derived = gguf_folder(gguf_path("llama_groups"))
    folder = Path(bench_quality.in_bf16(str(derived), str(tmp_path / "plain")))
    assert ModelConfig.from_pretrained(folder).weight_formats(QuantizationConfig()).is_none
    tensors, found = open_files(derived, "float32"), open_files(folder)
    assert dict(found.shapes) == dict(tensors.shapes)
    for name in tensors.shapes:
        rounded = tensors.read(name).astype("bfloat16").astype("float32").numpy()
        np.testing.assert_array_equal(found.read(name).astype("float32").numpy(), rounded, err_msg=name)
