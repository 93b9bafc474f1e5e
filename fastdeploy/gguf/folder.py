# SPDX-License-Identifier: Apache-2.0
"""Makes a folder in Hugging Face format from a GGUF file, which everything that reads a model then reads.

The folder holds config.json, generation_config.json and the files of the tokenizer, which follow from the metadata, and
links to the file and its other parts. It is made once, in the cache directory.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastdeploy.config.checkpoint_json import GGUF_NOTES
from fastdeploy.config.env import read_env
from fastdeploy.config.model_config import parse_model_config
from fastdeploy.config.quantization import GGUF
from fastdeploy.config.weight_files import GGUF_STEM, find_linked_gguf
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.ggml_types import PLAIN_TYPES
from fastdeploy.gguf.file import GGUFFile, part_name, part_number
from fastdeploy.gguf.metadata import metadata_notes
from fastdeploy.gguf.model_config import FREQ_FACTORS, make_config_json, make_generation_config
from fastdeploy.gguf.tensor_names import tensor_names
from fastdeploy.gguf.tokenizer import make_tokenizer_json
from fastdeploy.gguf.tokenizer_config import end_token_ids, make_tokenizer_config

logger = logging.getLogger(__name__)
VERSION = 1  # of what is derived; a change makes new folders
_NO_TOKENIZER = ("no_vocab", "none")  # of models that are used with token ids alone
_MAX_FACTOR_BYTES = 2**20  # of the tensor of rotary frequencies, which has a number for two inputs of a head
_DTYPES = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}
_temporary: dict[str, Path] = {}  # the folders that this process removes when it ends, by their keys
Contents = Mapping[str, Mapping[str, Any]]


def gguf_folder(path: Path, sampling: Mapping[str, float] = MappingProxyType({})) -> Path:
    """Return the folder of a GGUF file, which is made if it is not there.

    Two processes may make it at the same time: the folder appears when it is complete, and the first one counts. If the
    cache directory cannot be written, the folder is a temporary one, which this process removes in the end.

    Args:
        path: the only file, or the first part.
        sampling: defaults of sampling parameters, by their names in generation_config.json, where the file has none.

    Raises:
        ConfigError: the file is not valid, or the model is not supported.
    """
    file = GGUFFile.open(path)
    key = _key(file, sampling)
    parent = Path(read_env().cache_dir) / "gguf"
    folder = _temporary.get(key, parent / key)
    if folder.is_dir():
        return folder
    contents = _contents(file, sampling)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _make(folder, file, contents)
    except OSError as error:
        problem = f"cannot write {folder}: {error.strerror or error}"
        _temporary[key] = folder = _make_temporary(file, contents, problem)
        logger.warning("%s; what follows from %s is derived at each start", problem, path)
    return folder


def find_gguf(folder: Path) -> GGUFFile | None:
    """Return the GGUF file from which a folder was made, without metadata, or None if it was not made from one.

    Raises:
        ConfigError: the file is not there any more, or is not valid.
    """
    path = find_linked_gguf(folder)
    if path is None:
        return None
    part = part_number(path.name)
    parts = [path] if part is None else [path.with_name(part_name(part[0], n + 1, part[2])) for n in range(part[2])]
    return _open_again(path, tuple(map(_stamp, parts)))


@lru_cache(maxsize=2)  # a model and its draft model
def _open_again(path: Path, stamps: tuple[object, ...]) -> GGUFFile:
    """Read the headers once as long as the files stay the same; nobody needs the vocabulary again."""
    return replace(GGUFFile.open(path), metadata={})


def _stamp(path: Path) -> object:
    """Return what is different for another file at the same place."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _key(file: GGUFFile, sampling: Mapping[str, float]) -> str:
    """Return the name of a folder: a digest of all that its files depend on."""
    digest = blake2b(digest_size=16)
    for text in (str(VERSION), file.digest, str(file.path.absolute()), json.dumps(dict(sampling))):
        digest.update(os.fsencode(text) + b"\0")
    factors = file.tensors.get(FREQ_FACTORS)  # become numbers in config.json
    if factors is not None:
        with factors.file.open("rb") as stream:
            stream.seek(factors.offset)
            digest.update(stream.read(min(factors.num_bytes, _MAX_FACTOR_BYTES)))
    return digest.hexdigest()


def _make(folder: Path, file: GGUFFile, contents: Contents) -> None:
    """Make a folder, which appears when it is complete; leave it if another process makes it meanwhile."""
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(unfinished, file, contents)
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _make_temporary(file: GGUFFile, contents: Contents, problem: str) -> Path:
    """Make a folder that this process removes when it ends.

    Args:
        problem: with the cache directory, for the error if there is no place at all.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="fastdeploy-gguf-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _write(folder, file, contents)
    except OSError as error:
        reason = f"{problem}; nor a temporary folder: {error.strerror or error}"
        raise ConfigError("model", f"{file.path}: {reason}") from None
    return folder


def _contents(file: GGUFFile, sampling: Mapping[str, float]) -> Contents:
    """Return the JSON files that follow from the metadata, by name."""
    where, metadata = str(file.path), file.metadata
    config = make_config_json(metadata, file.tensors, where)
    tensor_names(config, file.tensors, where)  # refuses tensors that do not match the metadata
    matrices = [tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1]
    stored = next((kind for kind in matrices if kind not in PLAIN_TYPES), None)
    if stored is not None:
        config = {**config, "quantization_config": {"quant_method": GGUF}}
    elif matrices and set(matrices) <= set(_DTYPES) and len(set(matrices)) == 1:
        config = {**config, "torch_dtype": _DTYPES[matrices[0]]}
    if notes := [f"{where}: {note}" for note in metadata_notes(metadata)]:
        config = {**config, GGUF_NOTES: notes}
    generation, tokenizer = {**sampling, **make_generation_config(metadata, where)}, {}
    if metadata.get("tokenizer.ggml.model") not in _NO_TOKENIZER:
        tokenizer = {
            "tokenizer.json": make_tokenizer_json(metadata, where),
            "tokenizer_config.json": make_tokenizer_config(metadata, where),
        }
        if ends := end_token_ids(metadata, where):
            generation = {**generation, "eos_token_id": ends}
    try:
        parse_model_config(config, generation)
    except ConfigError as error:
        raise ConfigError(error.field, f"{where}: {error.message}") from None
    return {"config.json": config, "generation_config.json": generation, **tokenizer}


def _write(folder: Path, file: GGUFFile, contents: Contents) -> None:
    for name, content in contents.items():
        with (folder / name).open("w", encoding="utf-8") as stream:
            json.dump(content, stream, ensure_ascii=False)
            stream.flush()
            os.fsync(stream.fileno())  # else the files may be empty after a power failure, and the folder be there
    count = len(file.parts)
    for number, part in enumerate(file.parts, 1):
        name = f"{GGUF_STEM}.gguf" if count == 1 else part_name(GGUF_STEM, number, count)
        (folder / name).symlink_to(part.absolute())
