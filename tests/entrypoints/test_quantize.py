# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy quantize` writes a folder that serves the text of the model that it was made from."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fastdeploy import LLM, SamplingParams
from fastdeploy.entrypoints.cli import show_config
from fastdeploy.entrypoints.openai.startup_summary import summary_lines

MTP = {"method": "mtp", "num_speculative_tokens": 3}
PROMPT = "for name in names:\n    print(name)\nfor name in"


def quantize(*arguments: str, prepare: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastdeploy.entrypoints.cli.main", "quantize", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, preexec_fn=prepare)


def text(model: str, **options: object) -> tuple[str, dict[str, object]]:
    llm = LLM(model=model, max_model_len=256, **options)
    (result,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=48))
    return result.outputs[0].text, llm.engine.describe()


def test_a_packed_folder_serves_the_same_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "demo-wint4"
    done = quantize("demo", str(folder), "--quantization", "wint4")
    assert done.returncode == 0 and "packing" not in done.stderr, "progress is for terminals"
    assert done.stdout.startswith(f"{folder}: ") and "attention wint4, mlp wint4, head wint8" in done.stdout
    assert {"config.json", "tokenizer.json", "README.md"} <= {file.name for file in folder.iterdir()}
    (plain, of_plain), (packed, of_packed) = (
        text(model, speculative_config=MTP, **options)
        for model, options in (("demo", {"quantization": "wint4"}), (str(folder), {}))
    )
    assert packed == plain
    assert of_packed["fingerprint"] == of_plain["fingerprint"]
    (row,) = [line for line in summary_lines(of_packed, ()) if line.startswith("  weights")]
    assert row.endswith("attention wint4, mlp wint4, head wint8, mapped from packed_weights.data")
    assert show_config.main([str(folder), "--output-format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)["values"]["quantization"]["value"]
    assert shown == {"attention": "wint4", "mlp": "wint4", "head": "wint8"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo"], "fastdeploy quantize: the following arguments are required: OUT"),
        (["demo", "OUT"], "--quantization: is missing; none packs the weights as they are"),
        (["demo", "OUT", "-q", "wint5"], "quantization: expected one of none, wint8, .* got 'wint5'"),
        (["demo", "OUT", "-q", "wint8", "--dtype", "float32"], "quantization: wint8 needs dtype bfloat16, got float32"),
        (["nowhere/at/all", "OUT", "-q", "wint8"], "model: nowhere/at/all is neither a directory nor a GGUF file"),
        (["demo", "FULL", "-q", "wint8"], "OUT: .*FULL exists and is not an empty folder"),
        (["demo", "OUT", "-q", "wint8", "--device", "gpu"], "--device: unknown flag"),
    ],
)
def test_wrong_arguments_are_one_line_and_write_nothing(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "file").touch()
    done = quantize(*(str(tmp_path / item) if item.isupper() else item for item in arguments))
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("fastdeploy: error: ")]
    assert re.search(message, line)
    assert [path.name for path in tmp_path.iterdir()] == ["FULL"]


def test_a_command_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from fastdeploy.entrypoints.cli.main import main
from fastdeploy.models import packed_store
packed_store.digest_memory = lambda *arguments: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(main(["quantize", "demo", {str(tmp_path / "out")!r}, "-q", "wint8"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = quantize("demo", str(tmp_path / "out"), "-q", "wint8", prepare=limit)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"fastdeploy: error: OUT: cannot write {tmp_path / 'out'}: File too large"
    assert not list(tmp_path.iterdir())
