# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/tokenizer_folders.json: tokenizer folders, and what `transformers` makes of them.

Run in an environment with transformers 5 (it is not needed to run the tests):

    python scripts/make_golden_tokenizers.py

The file has `bases`, the contents of three tokenizer.json by name, `texts`, and `folders`. Each folder has
    base          the tokenizer.json
    added_tokens  `added_tokens` of tokenizer.json
    files         name -> content of the other files
    ids           of each text, without the tokens that a post-processor adds
    decoded       of all ids in order, with and without special tokens
    skipped_ids   ids that decoding skips with the special tokens
    names         name -> text of the named special tokens
    vocab_size    number of ids
as `PreTrainedTokenizerFast.from_pretrained` gives them.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FILE = Path(__file__).resolve().parent.parent / "tests" / "golden" / "tokenizer_folders.json"
END, START, EXTRA = "<|im_end|>", "<|im_start|>", "<e>"
CORPUS = ["the user said hi", "the end of the text", "abc def"]
TEXTS = [
    f"the {END}end",
    f"{START}user\nHi there{END}\n{START}assistant\n",
    f"<s>the  end</s> {EXTRA} abc{EXTRA}def",
    "THE <E> <|IM_END|> [PAD]x<image>",
    " the <s> <pad>",
    "",
]


def byte_level() -> tokenizers.Tokenizer:
    """A byte-level BPE without special tokens, as of GPT-2 and Qwen."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet))
    return backend


def spaces_as_letters() -> tokenizers.Tokenizer:
    """A BPE in the manner of Llama: U+2581 for spaces, one of which is put in front, and bytes as fallback."""
    alphabet = [*sorted(set("".join(TEXTS + CORPUS)) - {" ", "\n"}), "\u2581"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(32)), *alphabet, "th", "the", "\u2581the"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def lower_case() -> tokenizers.Tokenizer:
    """A unigram model of lower-case letters, so that it matters whether a token is found after normalization."""
    alphabet = [*sorted(set("".join(TEXTS + CORPUS).lower()) - {" ", "\n"}), "\u2581"]
    pieces = [("<unk>", 0.0), ("\u2581the", -1.0), ("\u2581end", -1.5), *((letter, -4.0) for letter in alphabet)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


BASES = {"byte_level": byte_level, "spaces_as_letters": spaces_as_letters, "lower_case": lower_case}


def token(content: str, **flags: bool) -> dict[str, Any]:
    """Return the object of a token with all flags, as in `added_tokens_decoder`."""
    return {"content": content, **dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False), **flags}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    """Return the object of a token as tokenizer_config.json holds it in the place of a text."""
    return {"__type": "AddedToken", **token(content, **flags)}


def folders(size: int, base: str) -> list[dict[str, Any]]:
    """Return the folders of one base, whose first free id is `size`."""
    end, ordinary = token(END, special=True), token(END, special=False, normalized=True)

    def folder(
        config: dict[str, Any] | None = None,
        tokens_map: dict[str, Any] | None = None,
        added: dict[str, int] | None = None,
        tokens: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        contents = {"tokenizer_config.json": config, "special_tokens_map.json": tokens_map, "added_tokens.json": added}
        files = {name: content for name, content in contents.items() if content is not None}
        added_tokens = [{"id": size + i, **item} for i, item in enumerate(tokens or [])]
        return {"base": base, "added_tokens": added_tokens, "files": files}

    decoder = {"added_tokens_decoder": {str(size): end}}
    empty: dict[str, Any] = {"added_tokens_decoder": {}}
    both = {str(size): token(START, special=True), str(size + 1): end}
    return [
        folder(),
        folder(decoder),
        folder({"added_tokens_decoder": {str(size): {"content": END}}}),
        folder({"added_tokens_decoder": both, "eos_token": END, "pad_token": EXTRA}),
        folder({"added_tokens_decoder": {str(size): ordinary}, "eos_token": END}),
        folder({"added_tokens_decoder": {str(size): token(END, special=True, lstrip=True)}}, tokens=[end]),
        folder({"added_tokens_decoder": {str(size): token(EXTRA, single_word=True, rstrip=True)}}),
        folder({"added_tokens_decoder": {str(size): ordinary}}, tokens=[end]),
        folder(decoder, tokens=[ordinary]),
        folder(added={END: size}),
        folder({"eos_token": END}, added={START: size, END: size + 1}),
        folder({"eos_token": END}, added={END: size}, tokens=[ordinary]),
        folder({"eos_token": END}, tokens=[ordinary]),
        folder({"eos_token": END, **empty}, tokens=[ordinary]),
        folder({"eos_token": END, "additional_special_tokens": [EXTRA, "e"], "unk_token": "<unk>"}),
        folder({"additional_special_tokens": [END], "extra_special_tokens": [EXTRA]}),
        folder({"additional_special_tokens": [typed(END, special=True, rstrip=True), typed(EXTRA)]}),
        folder({"additional_special_tokens": [END]}, added={END: size, EXTRA: size + 1}),
        folder({"additional_special_tokens": [END]}, tokens=[ordinary]),
        folder(tokens_map={"additional_special_tokens": [END]}),
        folder(tokens_map={"additional_special_tokens": [END]}, added={END: size}),
        folder({"extra_special_tokens": [EXTRA]}, {"extra_special_tokens": [END, token("[PAD]", lstrip=True)]}),
        folder({"extra_special_tokens": {"image_token": "<image>"}}, {"extra_special_tokens": {"x_token": EXTRA}}),
        folder({"image_token": "<image>", "model_specific_special_tokens": {"x_token": EXTRA}}),
        folder({"model_specific_special_tokens": {"x_token": EXTRA}}),
        folder({"image_token": typed("<image>"), "bos_token": "<s>"}, {"video_token": EXTRA}),
        folder({"eos_token": "</s>", "bos_token": "<s>"}, {"eos_token": END, "pad_token": "[PAD]"}),
        folder({"eos_token": "</s>"}, {"eos_token": token(END, lstrip=True)}),
        folder({"eos_token": "</s>", **decoder}, {"eos_token": END, "pad_token": "[PAD]"}),
        folder({"eos_token": typed(END, normalized=False)}, {"bos_token": None}),
        folder({"mask_token": EXTRA, "cls_token": "<image>", "pad_token": "[PAD]", "bos_token": START}),
        folder({"split_special_tokens": True, "eos_token": END, **decoder}),
        folder({"split_special_tokens": True}, tokens=[end, token(EXTRA, special=False, normalized=True)]),
        folder({"add_prefix_space": True, **decoder}),
        folder({"add_prefix_space": False, "add_bos_token": True, "add_eos_token": True, "bos_token": "<s>"}),
        folder({"tokenizer_class": "LlamaTokenizer", "legacy": False, **decoder}),
    ]


def write_folder(path: Path, folder: dict[str, Any], bases: dict[str, Any]) -> None:
    """Write the files of a folder."""
    content = {**bases[folder["base"]], "added_tokens": folder["added_tokens"]}
    for name, value in {**folder["files"], "tokenizer.json": content}.items():
        (path / name).write_text(json.dumps(value))


def describe(path: Path) -> dict[str, Any]:
    """Return what transformers makes of a folder."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path))
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    every = [token_id for token_ids in ids for token_id in token_ids]
    size = max(tokenizer.get_vocab().values()) + 1
    decoded = {token_id: tokenizer.decode([token_id]) for token_id in range(size)}
    skipped = [i for i, text in decoded.items() if text and not tokenizer.decode([i], skip_special_tokens=True)]
    return {
        "ids": ids,
        "decoded": [tokenizer.decode(every), tokenizer.decode(every, skip_special_tokens=True)],
        "skipped_ids": skipped,
        "names": tokenizer.special_tokens_map,
        "vocab_size": size,
    }


def main() -> None:
    bases = {name: json.loads(make().to_str()) for name, make in BASES.items()}
    described = []
    for name, make in BASES.items():
        for folder in folders(make().get_vocab_size(), name):
            with TemporaryDirectory() as path:
                write_folder(Path(path), folder, bases)
                described.append({**folder, **describe(Path(path))})
    lines = ",\n".join(json.dumps(folder, separators=(",", ":")) for folder in described)
    head = f'"bases":{json.dumps(bases, separators=(",", ":"))},\n"texts":{json.dumps(TEXTS)}'
    FILE.write_text(f'{{{head},\n"folders":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
