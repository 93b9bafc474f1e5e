# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy tokenizer`: encodes, decodes and exports with a model's tokenizer, without a server."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fastdeploy.config.flags import FLAG_BY_NAME
from fastdeploy.core.errors import ConfigError
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.cli.parser import CommandParser
from fastdeploy.hub.model_path import resolve_model_path


def main(arguments: list[str]) -> int:
    """Print one line of JSON per flag, in the order of the help."""
    parser = CommandParser("tokenizer", "Encode or decode text with a model's tokenizer. Flags can be combined.")
    parser.add_argument("-m", "--model", required=True, help="local folder, GGUF file, name on a hub, smollm2 or demo")
    parser.add_argument("--gguf-file", default="", help=FLAG_BY_NAME["gguf_file"].help)
    parser.add_argument("-i", "--info", action="store_true", help="print the vocabulary size and the special tokens")
    parser.add_argument("-vs", "--vocab-size", action="store_true", help="print the vocabulary size")
    parser.add_argument("-e", "--encode", metavar="TEXT", help="print the token ids of a text")
    parser.add_argument(
        "-d", "--decode", metavar="IDS", help="print the text of token ids, such as '[5, 17]' or '5 17'"
    )
    parser.add_argument("-ve", "--vocab-export", metavar="FILE", help="write a JSON object of every token and its id")
    args = parser.parse_own(arguments)
    if not any((args.info, args.vocab_size, args.vocab_export)) and args.encode is None and args.decode is None:
        raise ConfigError("fastdeploy tokenizer", "no action given; see fastdeploy tokenizer --help")
    tokenizer = Tokenizer.from_pretrained(resolve_model_path(args.model, gguf_file=args.gguf_file))
    if args.info:
        print(json.dumps({"vocab_size": tokenizer.vocab_size, "special_tokens": tokenizer.special_tokens}))
    if args.vocab_size:
        print(tokenizer.vocab_size)
    if args.encode is not None:
        print(json.dumps(tokenizer.encode(args.encode)))
    if args.decode is not None:
        print(json.dumps(tokenizer.decode(_token_ids(args.decode, tokenizer), skip_special_tokens=False)))
    if args.vocab_export:
        _export(tokenizer, args.vocab_export)
    return 0


def _token_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    if not re.fullmatch(r"[\s\d,\[\]]*", text):
        raise ConfigError("--decode", f"expected token ids, got {text!r}")
    token_ids = [int(number) for number in re.findall(r"\d+", text)]
    for token_id in token_ids:
        if not tokenizer.has_token(token_id):
            raise ConfigError("--decode", f"token id {token_id} is not in the vocabulary")
    return token_ids


def _export(tokenizer: Tokenizer, path: str) -> None:
    vocab = dict(sorted(tokenizer.vocabulary().items(), key=lambda entry: entry[1]))
    try:
        Path(path).write_text(json.dumps(vocab, ensure_ascii=False, indent=0), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--vocab-export", f"cannot write {path!r}: {error.strerror}") from None
    print(f"{len(vocab)} tokens written to {path}")
