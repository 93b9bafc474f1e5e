# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy quantize`: writes a model's weights quantized and packed, which servers then map."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

from fastdeploy.config.convert import convert
from fastdeploy.config.flags import FLAG_BY_NAME
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.core.errors import ConfigError, device_errors
from fastdeploy.entrypoints.cli.parser import CommandParser
from fastdeploy.entrypoints.openai.startup_summary import ProgressBar
from fastdeploy.hub.model_path import resolve_model_path

DESCRIPTION = (
    "Quantize and pack the weights of MODEL and write them to the folder OUT, with copies of its configuration and "
    "tokenizer. fastdeploy serve OUT maps the weights and packs nothing. For --device cpu."
)


def main(arguments: list[str]) -> int:
    """Write the folder, with progress, and print one line about it."""
    parser = CommandParser("quantize", DESCRIPTION, positional="MODEL OUT")
    parser.add_argument("model", metavar="MODEL", help="local folder, GGUF file, name on a hub, smollm2 or demo")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder that does not exist or is empty")
    for name, short in (("quantization", ["-q"]), ("dtype", []), ("revision", []), ("gguf_file", [])):
        flag = FLAG_BY_NAME[name]
        parser.add_argument(flag.option, *short, metavar=flag.kind.upper(), help=flag.help.replace("%", "%%"))
    args = parser.parse_own(arguments)
    given = {name: _converted(name, value) for name, value in vars(args).items() if name in FLAG_BY_NAME}
    path = resolve_model_path(args.model, given["revision"] or "", gguf_file=given["gguf_file"] or "")
    config = ModelConfig.from_pretrained(path, dtype=given["dtype"] or "auto", generation_config="none")
    for note in config.notes:
        print(note, file=sys.stderr)
    formats = UNQUANTIZED if given["quantization"] is None else QuantizationConfig.from_value(given["quantization"])
    if not formats.is_given and not config.quantization.is_given:
        raise ConfigError("--quantization", "is missing; none packs the weights as they are")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was written is removed
    with device_errors():
        return _quantize(config, args.out, formats)


def _converted(name: str, value: Any) -> Any:
    """Return the value of an engine flag in its type, or None if it was not given."""
    flag = FLAG_BY_NAME[name]
    return None if value is None or name == "model" else convert(flag, value, flag.option)


def _quantize(config: ModelConfig, folder: Path, formats: QuantizationConfig) -> int:
    from fastdeploy.ops.startup import prepare

    prepare("cpu")
    from fastdeploy.models.packing import pack_checkpoint
    from fastdeploy.ops.registry import OperatorLibraryError, select_backend

    try:
        select_backend("cpu")
    except OperatorLibraryError as error:
        raise ConfigError("operator library", str(error).removeprefix("operator library: ")) from error

    started, bar = time.monotonic(), ProgressBar()
    header = pack_checkpoint(config, folder, formats, lambda _, fraction: bar.show("packing weights", fraction))
    layers = " and of its MTP layers" if header.mtp_tensors else ""
    print(
        f"{folder}: {header.num_bytes / 2**20:.1f} MiB, the weights of the model{layers}, {header.dtype}, "
        f"quantized: {header.quantization}, in {time.monotonic() - started:.1f} s"
    )
    return 0
