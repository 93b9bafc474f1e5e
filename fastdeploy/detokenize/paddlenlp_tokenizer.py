# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that only PaddleNLP can read: a child process converts them once, and the result is cached.

PaddleNLP depends on old releases of many packages and on its own Paddle, so it is never imported here.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from fastdeploy.config.env import child_environment, read_env
from fastdeploy.core.errors import ConfigError

_CONVERTER = Path(__file__).with_name("paddlenlp_convert.py")
_FILES = ("*.json", "*.txt", "*.model", "*.vocab", "*.tiktoken", "*.bpe")
_TIMEOUT_S = 600


def convert_with_paddlenlp(folder: Path, tokenizer_class: str) -> Path:
    """Return the path of the tokenizer.json that PaddleNLP converts a folder's files to, from the cache if possible.

    Raises:
        ConfigError: PaddleNLP is not installed, the cache cannot be written, or the conversion fails.
    """
    cache = Path(read_env().cache_dir) / "tokenizers" / _digest(folder)
    file = cache / "tokenizer.json"
    if file.is_file():
        return file
    python = _python(folder, tokenizer_class)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # API and engine processes start at the same time
            if not file.is_file():
                _convert(python, folder, tokenizer_class, file)
    except OSError as error:
        raise ConfigError("tokenizer", f"cannot write the cache {str(cache)!r}: {error.strerror}") from None
    return file


def _digest(folder: Path) -> str:
    """Return a digest of the converter and of the names and contents of all files that may be part of a tokenizer."""
    files = sorted({file for pattern in _FILES for file in folder.glob(pattern) if file.is_file()})
    digest = hashlib.blake2b(_CONVERTER.read_bytes(), digest_size=16)
    for file in files:
        content = hashlib.blake2b(file.read_bytes()).hexdigest()
        digest.update(f"{file.name}\0{content}\0".encode())
    return digest.hexdigest()


def _python(folder: Path, tokenizer_class: str) -> str:
    """Return a Python interpreter with PaddleNLP: this one, or FD_PADDLENLP_PYTHON."""
    if importlib.util.find_spec("paddlenlp") is not None:
        return sys.executable
    python = read_env().paddlenlp_python
    if not python:
        raise ConfigError(
            "tokenizer",
            f"{str(folder)!r}: {tokenizer_class} without tokenizer.json requires PaddleNLP: set "
            "FD_PADDLENLP_PYTHON to the Python of an environment with paddlenlp==3.0.0b4 (requirements-paddlenlp.txt) "
            "and paddlepaddle, or use a folder with tokenizer.json",
        )
    return python


def _convert(python: str, folder: Path, tokenizer_class: str, file: Path) -> None:
    """Run the converter; `file` is complete if it exists."""
    with TemporaryDirectory(dir=file.parent) as scratch:
        output = Path(scratch) / file.name
        command = [python, str(_CONVERTER), str(folder.resolve()), str(output)]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=child_environment()
            )
        except OSError as error:
            raise ConfigError("FD_PADDLENLP_PYTHON", f"cannot run {python!r}: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise ConfigError("tokenizer", f"{str(folder)!r}: PaddleNLP took more than {_TIMEOUT_S} s") from None
        if result.returncode != 0 or not output.is_file():
            reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
            raise ConfigError(
                "tokenizer", f"{str(folder)!r}: PaddleNLP cannot convert this {tokenizer_class}: {reason}"
            )
        os.replace(output, file)
