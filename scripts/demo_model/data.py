# SPDX-License-Identifier: Apache-2.0
"""The corpus: Python's own standard library, its pinned hash list, the tokenizer and the token arrays."""

from __future__ import annotations

import gzip
import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|reserved|>")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
HELD_OUT_PERMILLE = 35
HASH_LIST = Path(__file__).with_name("corpus.sha256.gz")

# Tables of characters, generated grammars and other files in which a small model would only learn rows of numbers.
SKIPPED_PREFIXES = ("encodings/cp", "encodings/iso8859", "encodings/mac_", "encodings/koi8", "pydoc_data/")
SKIPPED_PARTS = ("lib2to3/tests/data/bom", "test/bad_coding", "test/badsyntax", "test/test_unicode_file")
MAX_DIGIT_SHARE = 0.25

# A line break takes the following indentation along; words take one leading space; digits go in threes.
SPLIT_PATTERN = r"[\r\n]+[ \t]*| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|[ \t]+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}"
    "{% for line in message['content'].splitlines() %}{{ '# ' + line + '\\n' }}{% endfor %}"
    "{% else %}"
    "{{ message['content'].rstrip() }}{% if not loop.last %}{{ '\\n\\n' }}{% endif %}"
    "{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus."""

    path: str
    text: str
    digest: str

    @property
    def held_out(self) -> bool:
        """Whether the file belongs to the held-out part: decided by its path alone."""
        return int(hashlib.sha256(self.path.encode()).hexdigest()[:8], 16) % 1000 < HELD_OUT_PERMILLE


def is_table(path: str, text: str) -> bool:
    """Tells data written as Python from programs."""
    digits = sum(character.isdigit() for character in text)
    return path.startswith(SKIPPED_PREFIXES) or digits > MAX_DIGIT_SHARE * max(1, len(text))


def read_corpus() -> list[SourceFile]:
    """Reads every usable `.py` file of the running Python's standard library, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "dist-packages" in name or name.startswith("_sysconfigdata"):
            continue
        if any(part in name for part in SKIPPED_PARTS):
            continue
        raw = path.read_bytes()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) > 0 and not is_table(name, text):
            text = text.replace("\r\n", "\n").expandtabs(8)
            files.append(SourceFile(name, text, hashlib.sha256(raw).hexdigest()[:16]))
    return files


def write_hash_list(files: list[SourceFile]) -> None:
    """Pins the corpus: one `digest path` line per file, compressed without a time stamp."""
    lines = "".join(f"{file.digest} {file.path}\n" for file in files)
    HASH_LIST.write_bytes(gzip.compress(lines.encode(), mtime=0))


def check_hash_list(files: list[SourceFile]) -> list[str]:
    """Compares the corpus with the pinned list; returns one line per file that is missing, new or different."""
    pinned = {}
    for line in gzip.decompress(HASH_LIST.read_bytes()).decode().splitlines():
        digest, path = line.split(" ", 1)
        pinned[path] = digest
    found = {file.path: file.digest for file in files}
    differences = [f"missing: {path}" for path in pinned.keys() - found.keys()]
    differences += [f"new: {path}" for path in found.keys() - pinned.keys()]
    differences += [f"different: {path}" for path in pinned.keys() & found.keys() if pinned[path] != found[path]]
    return sorted(differences)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Trains the byte-level BPE vocabulary; `<s>` is put before every encoded text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    return tokenizer


def tokenizer_config(max_positions: int) -> dict:
    """Returns the contents of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": CHAT_TEMPLATE,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(max_positions), indent=2) + "\n")


def encode_documents(tokenizer: Tokenizer, files: list[SourceFile]) -> list[np.ndarray]:
    """Encodes each file as `<s> text </s>`, uint16."""
    encoded = tokenizer.encode_batch([file.text for file in files])
    return [np.array([*one.ids, EOS_ID], dtype=np.uint16) for one in encoded]


def save_documents(documents: list[np.ndarray], path: Path) -> None:
    """Writes documents as one token array and their `[num_documents + 1]` offsets."""
    offsets = np.cumsum([0] + [len(document) for document in documents])
    np.savez(path, tokens=np.concatenate(documents), offsets=offsets)


class PackedTokens:
    """Draws training rows: documents in a new order each epoch, joined and cut to rows of equal length."""

    def __init__(self, path: Path, seed: int) -> None:
        archive = np.load(path)
        self.tokens, self.offsets = archive["tokens"], archive["offsets"]
        self.seed = seed

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch."""
        return len(self.tokens)

    def epoch(self, index: int, row_length: int) -> np.ndarray:
        """Returns the rows of epoch `index`, shuffled, `[num_rows, row_length + 1]` uint16.

        Each row starts with `<s>`, so that a text from the middle of a file is as usual after it as a file's start.
        """
        random = np.random.default_rng((self.seed, index))
        order = random.permutation(len(self.offsets) - 1)
        stream = np.concatenate([self.tokens[self.offsets[i] : self.offsets[i + 1]] for i in order])
        stream = stream[int(random.integers(row_length)) :]
        num_rows = len(stream) // row_length
        rows = stream[: num_rows * row_length].reshape(num_rows, row_length)[random.permutation(num_rows)]
        return np.concatenate((np.full((num_rows, 1), BOS_ID, dtype=np.uint16), rows), axis=1)


def prepare(work_dir: Path, pin: bool) -> None:
    """Reads the corpus, checks or writes its hash list, trains the tokenizer and saves both token arrays."""
    files = read_corpus()
    if pin:
        write_hash_list(files)
    differences = check_hash_list(files)
    for line in differences[:20]:
        print(line)
    if differences:
        print(f"warning: {len(differences)} files differ from the pinned standard library; figures will differ too")
    train = [file for file in files if not file.held_out]
    held = [file for file in files if file.held_out]
    tokenizer = train_tokenizer([file.text for file in train])
    save_tokenizer(tokenizer, work_dir, max_positions=2048)
    counts: dict[str, int] = {}
    for name, part in (("train", train), ("held_out", held)):
        documents = encode_documents(tokenizer, part)
        save_documents(documents, work_dir / f"{name}.npz")
        num_bytes = sum(len(file.text.encode()) for file in part)
        num_tokens = sum(map(len, documents))
        counts |= {f"{name}_files": len(part), f"{name}_bytes": num_bytes, f"{name}_tokens": num_tokens}
    (work_dir / "corpus.json").write_text(json.dumps(counts, indent=2) + "\n")
    print(json.dumps(counts))
