# SPDX-License-Identifier: Apache-2.0
"""Makes a folder in Hugging Face format from a GGUF file, which everything that reads a model then reads.

The folder holds config.json, generation_config.json and the files of the tokenizer, which follow from the metadata, and
links to the file and its other parts. It is made once, in the cache directory.
"""

from __future__ import annotations

import atexit
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
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
from fastdeploy.gguf.file import GGUFFile, part_name
from fastdeploy.gguf.metadata import metadata_notes
from fastdeploy.gguf.model_config import make_config_json, make_generation_config
from fastdeploy.gguf.tokenizer import make_tokenizer_json
from fastdeploy.gguf.tokenizer_config import end_token_ids, make_tokenizer_config

logger = logging.getLogger(__name__)
VERSION = 1  # of what is derived; a change makes new folders
_NO_TOKENIZER = ("no_vocab", "none")  # of models that are used with token ids alone
_DTYPES = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}


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
    key = f"{VERSION}\0{file.digest}\0{path.resolve()}\0{json.dumps(dict(sampling))}"
    digest = blake2b(key.encode(), digest_size=16).hexdigest()
    parent = Path(read_env().cache_dir) / "gguf"
    folder = parent / digest
    if folder.is_dir():
        return folder
    contents = _contents(file, sampling)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{digest}.", dir=parent))
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="fastdeploy-gguf-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        logger.warning("cannot write %s (%s): the files of %s are derived at each start", parent, error.strerror, path)
        _write(folder, file, contents)
        return folder
    try:
        _write(unfinished, file, contents)
        unfinished.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was faster
            raise ConfigError("model", f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def find_gguf(folder: Path) -> GGUFFile | None:
    """Return the GGUF file from which a folder was made, or None if it was not made from one.

    Raises:
        ConfigError: the file is not there any more, or is not valid.
    """
    path = find_linked_gguf(folder)
    return None if path is None else GGUFFile.open(path)


def _contents(file: GGUFFile, sampling: Mapping[str, float]) -> Mapping[str, Mapping[str, Any]]:
    """Return the JSON files that follow from the metadata, by name."""
    where, metadata = str(file.path), file.metadata
    config = make_config_json(metadata, file.tensors, where)
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


def _write(folder: Path, file: GGUFFile, contents: Mapping[str, Mapping[str, Any]]) -> None:
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    count = len(file.parts)
    for number, part in enumerate(file.parts, 1):
        name = f"{GGUF_STEM}.gguf" if count == 1 else part_name(GGUF_STEM, number, count)
        (folder / name).symlink_to(part.absolute())
