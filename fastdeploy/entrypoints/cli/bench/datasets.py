# SPDX-License-Identifier: Apache-2.0
"""Prompts for benchmarks: random tokens, a ShareGPT file, or a JSONL file of prompts."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdeploy.core.errors import ConfigError
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.cli.parser import positive_int
from fastdeploy.hub.model_path import resolve_model_path

DATASETS = ("random", "sharegpt", "custom")
MIN_TOKENS = 4  # shorter prompts and answers of a ShareGPT file are skipped, as other benchmarks do
MAX_PROMPT_TOKENS = 1024


@dataclass(frozen=True)
class SampleRequest:
    """A prompt as token ids and as text, and the number of output tokens to request."""

    token_ids: list[int]
    prompt: str
    output_len: int


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select a dataset."""
    parser.add_argument("--dataset-name", choices=DATASETS, default="random", help="source of the prompts")
    parser.add_argument(
        "--dataset-path", help="sharegpt: JSON file of conversations; custom: JSONL file with 'prompt' in each line"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for prompts, lengths and arrival times")
    parser.add_argument(
        "--sharegpt-output-len", type=positive_int, help="sharegpt: output tokens; default: length of the file's answer"
    )
    parser.add_argument(
        "--custom-output-len",
        type=positive_int,
        default=256,
        help="custom: output tokens of lines without output_tokens",
    )


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a model.

    Raises:
        ConfigError: the model has none; the message names the flag that selects another.
    """
    try:
        return Tokenizer.from_pretrained(resolve_model_path(name))
    except ConfigError as error:
        raise ConfigError("--tokenizer", f"cannot load a tokenizer to count tokens: {error}") from None


def random_requests(
    tokenizer: Tokenizer, count: int, input_len: int, output_len: int, range_ratio: float, prefix_len: int, seed: int
) -> list[SampleRequest]:
    """Return requests with random tokens, the first `prefix_len` of which are the same in all prompts.

    Lengths are uniform in [len * (1 - range_ratio), len * (1 + range_ratio)].
    """
    rng = random.Random(seed)
    ids = [i for i in range(tokenizer.vocab_size) if tokenizer.has_token(i) and i not in tokenizer.special_ids]
    prefix = rng.choices(ids, k=prefix_len)

    def length(mean: int) -> int:
        return max(1, rng.randint(int(mean * (1 - range_ratio)), int(mean * (1 + range_ratio))))

    requests = []
    for _ in range(count):
        token_ids = prefix + rng.choices(ids, k=length(input_len))
        requests.append(SampleRequest(token_ids, _text_of_length(tokenizer, token_ids), length(output_len)))
    return requests


def _text_of_length(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Return a text of about as many tokens; the text of random tokens often encodes to more."""
    encoded = tokenizer.encode(tokenizer.decode(token_ids), add_special_tokens=False)
    return tokenizer.decode(encoded[: len(token_ids)])


def file_requests(args: argparse.Namespace, tokenizer: Tokenizer, count: int) -> list[SampleRequest]:
    """Return up to `count` requests from the file of --dataset-path, shuffled with the seed.

    Raises:
        ConfigError: the file is missing or has another format, or no prompt in it has a suitable length.
    """
    if not args.dataset_path:
        raise ConfigError("--dataset-path", f"required for the dataset {args.dataset_name}")
    parse = _parse_sharegpt if args.dataset_name == "sharegpt" else _parse_custom
    try:
        requests = list(parse(Path(args.dataset_path).read_text(encoding="utf-8"), args, tokenizer))
    except OSError as error:
        raise ConfigError("--dataset-path", f"cannot read {args.dataset_path!r}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            "--dataset-path", f"{args.dataset_path!r} is not a {args.dataset_name} file: {reason}"
        ) from None
    if not requests:
        raise ConfigError("--dataset-path", f"{args.dataset_path!r} has no prompt of a suitable length")
    random.Random(args.seed).shuffle(requests)
    return requests[:count]


def _parse_sharegpt(text: str, args: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[SampleRequest]:
    """Yield the first message of each conversation, with the length of its answer."""
    for entry in json.loads(text):
        messages = entry["conversations"]
        if len(messages) < 2:
            continue
        token_ids = tokenizer.encode(messages[0]["value"])
        output_len = args.sharegpt_output_len or len(tokenizer.encode(messages[1]["value"], add_special_tokens=False))
        if MIN_TOKENS <= len(token_ids) <= MAX_PROMPT_TOKENS and output_len >= MIN_TOKENS:
            yield SampleRequest(token_ids, messages[0]["value"], output_len)


def _parse_custom(text: str, args: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[SampleRequest]:
    for line in filter(str.strip, text.split("\n")):
        entry: dict[str, Any] = json.loads(line)
        output_len = int(entry.get("output_tokens", args.custom_output_len))
        yield SampleRequest(tokenizer.encode(entry["prompt"]), entry["prompt"], output_len)
