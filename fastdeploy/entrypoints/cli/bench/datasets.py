# SPDX-License-Identifier: Apache-2.0
"""Where the prompts of a measurement come from: drawn at random, a ShareGPT file, or lines of one's own."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdeploy.config.model_config import resolve_model_path
from fastdeploy.core.errors import ConfigError
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.cli.parser import positive_int

DATASETS = ("random", "sharegpt", "custom")
MIN_TOKENS = 4  # shorter prompts and answers of a ShareGPT file are left out, as is usual
MAX_PROMPT_TOKENS = 1024


@dataclass(frozen=True)
class Sample:
    """A prompt, its length, and how many tokens are asked for."""

    token_ids: list[int]
    prompt: str
    output_len: int


def add_dataset_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the flags that choose a dataset."""
    parser.add_argument("--dataset-name", choices=DATASETS, default=default, help="kind of the prompts")
    parser.add_argument("--dataset-path", help="sharegpt: a JSON file of conversations; custom: JSONL with prompt")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of prompts, lengths and arrivals")
    parser.add_argument("--sharegpt-output-len", type=positive_int, help="sharegpt: instead of the answers' lengths")
    parser.add_argument("--custom-output-len", type=positive_int, default=256, help="custom: where no output_tokens is")


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a model's folder.

    Raises:
        ConfigError: there is none; says which flag names another.
    """
    try:
        return Tokenizer.from_pretrained(resolve_model_path(name))
    except ConfigError as error:
        raise ConfigError("--tokenizer", f"no tokenizer to count tokens with: {error}") from None


def random_samples(
    tokenizer: Tokenizer, count: int, input_len: int, output_len: int, range_ratio: float, prefix_len: int, seed: int
) -> list[Sample]:
    """Return prompts of random tokens, `prefix_len` of which all have in common.

    Lengths are drawn evenly from [len * (1 - range_ratio), len * (1 + range_ratio)].
    """
    draw = random.Random(seed)
    known = [i for i in range(tokenizer.vocab_size) if tokenizer.knows(i) and i not in tokenizer.special_ids]
    prefix = draw.choices(known, k=prefix_len)

    def length(mean: int) -> int:
        return max(1, draw.randint(int(mean * (1 - range_ratio)), int(mean * (1 + range_ratio))))

    samples = []
    for _ in range(count):
        token_ids = prefix + draw.choices(known, k=length(input_len))
        samples.append(Sample(token_ids, _text_of_length(tokenizer, token_ids), length(output_len)))
    return samples


def _text_of_length(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Return a text that is read as about as many tokens: the text of random tokens is often read as more."""
    read = tokenizer.encode(tokenizer.decode(token_ids), add_special_tokens=False)
    return tokenizer.decode(read[: len(token_ids)])


def file_samples(args: argparse.Namespace, tokenizer: Tokenizer, count: int) -> list[Sample]:
    """Return up to `count` prompts of the file that the flags name, in an order drawn from the seed.

    Raises:
        ConfigError: no such file, not of this kind, or no fitting prompt in it.
    """
    if not args.dataset_path:
        raise ConfigError("--dataset-path", f"the dataset {args.dataset_name} needs a file")
    read = _sharegpt if args.dataset_name == "sharegpt" else _custom
    try:
        found = list(read(Path(args.dataset_path).read_text(encoding="utf-8"), args, tokenizer))
    except OSError as error:
        raise ConfigError("--dataset-path", f"cannot read {args.dataset_path!r}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "--dataset-path", f"{args.dataset_path!r} is no {args.dataset_name} file: {type(error).__name__}: {error}"
        ) from None
    if not found:
        raise ConfigError("--dataset-path", f"{args.dataset_path!r} holds no fitting prompt")
    random.Random(args.seed).shuffle(found)
    return found[:count]


def _sharegpt(text: str, args: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[Sample]:
    """Yield the first message of each conversation, with the length of its answer."""
    for entry in json.loads(text):
        turns = entry["conversations"]
        if len(turns) < 2:
            continue
        token_ids = tokenizer.encode(turns[0]["value"])
        output_len = args.sharegpt_output_len or len(tokenizer.encode(turns[1]["value"], add_special_tokens=False))
        if MIN_TOKENS <= len(token_ids) <= MAX_PROMPT_TOKENS and output_len >= MIN_TOKENS:
            yield Sample(token_ids, turns[0]["value"], output_len)


def _custom(text: str, args: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[Sample]:
    for line in filter(str.strip, text.split("\n")):
        entry: dict[str, Any] = json.loads(line)
        output_len = int(entry.get("output_tokens", args.custom_output_len))
        yield Sample(tokenizer.encode(entry["prompt"]), entry["prompt"], output_len)
