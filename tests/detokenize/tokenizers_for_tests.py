# SPDX-License-Identifier: Apache-2.0
"""Tiny tokenizers of the three common kinds, built in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fastdeploy.detokenize.added_tokens import wrap_in_tokens
from fastdeploy.detokenize.tokenizer import Tokenizer

CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "for name in names:\n    print(name, end=' ')\n",
    "héllo wörld, 你好 世界, привет мир, 🙂🙃 done. END of the text STOP",
    "the quick brown fox jumps over the lazy dog, the end",
] * 4
SPECIAL_TOKENS = ["<s>", "</s>", "<|user|>"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_level_backend() -> tokenizers.Tokenizer:
    """A byte-level BPE of 400 ids."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think> now"])  # added, not special, with a space in it
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    """A BPE with spaces as U+2581 and without byte fallback."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIAL_TOKENS], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """A BPE in Llama's manner: U+2581 for spaces, bytes for unknown characters, one space stripped at the start."""
    trained = metaspace_backend()
    vocab = json.loads(trained.to_str())["model"]
    tokens = dict(vocab["vocab"])
    for byte in range(256):
        tokens[f"<0x{byte:02X}>"] = len(tokens)
    merges = [tuple(pair) for pair in vocab["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(tokens, merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL_TOKENS)
    return backend


BACKENDS = {"byte_level": byte_level_backend, "metaspace": metaspace_backend, "byte_fallback": byte_fallback_backend}


@cache
def make_tokenizer(kind: str) -> Tokenizer:
    """Return the tokenizer of that kind, with a chat template."""
    return Tokenizer(BACKENDS[kind](), NAMED, CHAT_TEMPLATE)


def save_tokenizer(
    folder: Path, kind: str = "byte_level", special_tokens: Sequence[str] = (), adds_bos: bool = False
) -> Path:
    """Write tokenizer.json, with further special tokens, and tokenizer_config.json into `folder`."""
    backend = BACKENDS[kind]()
    backend.add_special_tokens(list(special_tokens))
    if adds_bos:
        wrap_in_tokens(backend, "<s>", None)
    backend.save(str(folder / "tokenizer.json"))
    config = {**NAMED, "eos_token": {"content": "</s>", "special": True}, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
