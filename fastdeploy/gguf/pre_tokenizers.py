# SPDX-License-Identifier: Apache-2.0
"""How the byte-level tokenizers that GGUF files name split text into words: `tokenizer.ggml.pre`.

The patterns are those that llama.cpp applies, which for some models differ a little from the original tokenizers: it
knows contractions only in ASCII, and it does not distinguish the case of other letters. A name that is not here is
refused: a wrong pattern changes the ids of one text in six, and nobody would notice why the answers are worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.split_patterns import ASCII_CONTRACTIONS, GPT2_PATTERN, cased_words_pattern, words_pattern


@dataclass(frozen=True)
class PreTokenizer:
    """A way to split text.

    Attributes:
        patterns: each splits what the one before it has left, into what it matches and what is between.
        ignore_merges: a word that is a token is not split further, whatever the merges are.
        add_bos: begin with the BOS token, if the file does not say whether to.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_DIGITS, _UP_TO_3 = r"\p{N}", r"\p{N}{1,3}"
_GPT2 = PreTokenizer((GPT2_PATTERN,))
_STARCODER = PreTokenizer((_DIGITS, GPT2_PATTERN))
_QWEN2 = PreTokenizer((words_pattern(ASCII_CONTRACTIONS),))
_LLAMA3 = PreTokenizer((words_pattern(ASCII_CONTRACTIONS, number=_UP_TO_3),))
_GPT_4O = PreTokenizer((cased_words_pattern(f"{ASCII_CONTRACTIONS}?", number=_UP_TO_3),))
_TEKKEN = PreTokenizer((cased_words_pattern(),), ignore_merges=True, add_bos=True)
_QWEN35 = PreTokenizer((words_pattern(ASCII_CONTRACTIONS, letters=r"\p{L}\p{M}"),))
_MINICPM5 = PreTokenizer((_UP_TO_3, words_pattern(ASCII_CONTRACTIONS, number=r"\p{N}+")), ignore_merges=True)
_LAGUNA = PreTokenizer((r"[^\n]+|\n+", *_QWEN2.patterns))
_SEED_CODER = PreTokenizer(
    (
        "|".join(
            (
                ASCII_CONTRACTIONS,
                r"[^\r\n\p{L}\p{N}]?\p{L}+",
                r"\p{N}",
                r" ?[^\s\p{L}\p{N}\r\n]+",
                r"\s*[\r\n]+",
                r"\s+(?!\S)",
                r"\s+",
            )
        ),
    )
)
_BAILING = PreTokenizer(
    (
        "|".join(
            (
                r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])",
                r"[^\r\n\p{L}\p{N}]?\p{L}+",
                r"\p{N}",
                r" ?[^\s\p{L}\p{N}]+[\r\n]*",
                r"\s*[\r\n]",
                r"\s+(?!\S)",
                r"\s+",
            )
        ),
    )
)
_DEEPSEEK_V3 = PreTokenizer(
    (
        _UP_TO_3,
        r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
        "|".join(
            (
                r"[!-/:-@\[-`{-~][A-Za-z]+",
                r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
                r" ?[\p{P}\p{S}]+[\r\n]*",
                r"\s*[\r\n]+",
                r"\s+(?!\S)",
                r"\s+",
            )
        ),
    )
)
_DEEPSEEK_CODER = PreTokenizer(
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u0800-\u9FA5\uAC00-\uD7FF&&[^\s]]+", _DIGITS)
)
_FALCON = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_PATTERN, "[0-9]{3}"))

_NAMES: Mapping[str, PreTokenizer] = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": replace(
        _LLAMA3, ignore_merges=True, add_bos=True
    ),
    "glm4 glm5": replace(_LLAMA3, ignore_merges=True),
    "chatglm-bpe dbrx smaug-bpe": _LLAMA3,
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": _QWEN2,
    "qwen35": _QWEN35,
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": _STARCODER,
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling": _GPT2,
    "tekken": _TEKKEN,
    "gpt-4o llama4 kanana2 talkie minimax-m2": _GPT_4O,
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _DEEPSEEK_V3,
    "deepseek-coder": _DEEPSEEK_CODER,
    "falcon": _FALCON,
    "bailingmoe bailingmoe2 llada-moe": _BAILING,
    "seed-coder": _SEED_CODER,
    "minicpm5": _MINICPM5,
    "laguna": _LAGUNA,
    "ufakzeka": PreTokenizer((words_pattern(),)),
}
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: pre_tokenizer for names, pre_tokenizer in _NAMES.items() for name in names.split()
}
"""By the names in GGUF files."""


def find_pre_tokenizer(name: object, where: str) -> PreTokenizer:
    """Return what a name in a file means.

    A file without a name, or with `default`, is refused, too: llama.cpp splits its texts in a way that no model was
    trained with, and warns that the quality is degraded.

    Raises:
        ConfigError: the name is not known.
    """
    if isinstance(name, str) and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    known = ", ".join(sorted(PRE_TOKENIZERS))
    if name is None or name == "default":
        problem = "does not say how text is split into words; convert the model again with a newer converter"
    else:
        problem = f"{name!r:.80} is not supported"
    raise ConfigError("tokenizer", f"{where}: tokenizer.ggml.pre: {problem} (known: {known})")
