# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/gguf_tokenizers.json: vocabularies, texts, and the ids that llama.cpp gives the texts.

Run in an environment with llama-cpp-python 0.3.36 and gguf 0.19 (they are not needed to run the tests):

    python scripts/make_golden_gguf_tokenizers.py

The vocabularies are made of the texts alone, without splitting them into words first, so that a wrong split changes
ids. The file has
    texts          160 of them
    byte_level     a vocabulary of kind gpt2: its `merges`, `words` that no merge makes, and `special` tokens
    splits         name (`tokenizer.ggml.pre`) -> index of what llama.cpp makes of the texts with it
    byte_level_ids by that index: `adds_bos`, `ids` with special tokens parsed, `plain_ids` without; null in `ids` means
                   those of the first index, and in `plain_ids` those in `ids`
    sentencepiece  a vocabulary of kind llama: `pieces` of text, score and type
    variants       `keys` of a file, and `ids` and `plain_ids` of the texts with it
    special_tokens tokens and keys of files, and which tokens llama.cpp takes for control tokens and ends
"""

from __future__ import annotations

import ctypes
import json
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
from llama_cpp import llama_cpp

FILE = Path(__file__).resolve().parent.parent / "tests" / "golden" / "gguf_tokenizers.json"
NUM_MERGES, NUM_PIECES, NUM_TEXTS = 1100, 700, 160
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPLITS = """
llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 glm4 glm5 chatglm-bpe dbrx smaug-bpe qwen2
deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 qwen35 smollm starcoder refact command-r
codeshell exaone minerva-7b mellum2 gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling
tekken gpt-4o llama4 kanana2 talkie minimax-m2 deepseek-v3 hunyuan-dense joyai-llm hy_v4 deepseek-coder falcon
bailingmoe bailingmoe2 llada-moe seed-coder minicpm5 laguna ufakzeka
"""
SPECIAL = {"<s>": CONTROL, "</s>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": NORMAL, "<think>": USER_DEFINED}
SPECIAL |= {"[PAD7]": UNUSED, "<unk>": UNKNOWN}
WORDS = ["Ġunmerged", "Ġzzyzx", "Ä¿Ä¿", "ĠĠĠĠĠĠ", "----"]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"add_space_prefix": False, "add_bos_token": False},
    {"add_eos_token": True, "bos_token_id": 1, "eos_token_id": 2},
]
TEXTS = [
    *(
        "",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\r\n",
        "\r\n\r\n x",
        "\t",
        "\t\t a",
        " \n \n",
        "a",
        " a",
        "  a",
        "a ",
        "a  ",
    ),
    "Hello, World! Hello,World!  How are you?",
    "it's we're they've I'm you'll he'd don't IT'S WE'RE THEY'VE I'M YOU'LL HE'D DON'T",
    "it’s we’re ’tis 'quoted' ''s 'sing 'Stop 'reliable 'Vex rock'n'roll O'Reilly's",
    "'\u017fx a'\u017f 'K'\ufb05 a'\u212a",
    "1 12 123 1234 12345 123456 1234567890 3.14159 1,000,000 1e-9 0x1F 2024-02-29 v1.2.3",
    "٣٤٥٦ १२३४ Ⅷ ½ ² ³⁴ ①② 一二三 ７８９０",
    "if (x == 1) {\n    return foo(bar[0], 'baz');\n}\n",
    "def add(a: int, b: int) -> int:\n\treturn a + b  # sum\n\n\nclass A:\n    pass\n",
    '#include <stdio.h>\nint main(void) { printf("%d\\n", 1); return 0; }',
    "SELECT * FROM t WHERE a>=10 AND b<>'x';--comment",
    "https://example.com/a/b?c=d&e=%20f#g user@example.org C:\\dir\\file.txt",
    '<html><body class="a">text</body></html> {"key": [1, 2.5, null, true]}',
    "camelCase PascalCase snake_case SCREAMING_CASE kebab-case HTTPServer XMLHttpRequest iPhone McDonald",
    "ÀÉÎ àéî Straße ŒUVRE ǅungla ǄUNGLA ǆungla ʰa Ḁḁ",
    "Ünïcödé e\u0301le\u0300ve \u00e9l\u00e8ve A\u030a \u00c5 \u212b o\u0308\u0323 \u1e9b\u0323",
    "你好，世界。深度学习框架！中文English混排123数字。",
    "日本語のテスト、カタカナとひらがな。ｶﾀｶﾅ ﾊﾝｶｸ ー々",
    "한국어 텍스트 \u1112\u1161\u11ab\u1100\u1173\u11af ㄱㄴㄷ ㅏㅑ",
    "Привет, мир! ПРИВЕТ Ёлка їжак",
    "Ελληνικά ΑΒΓ άέή ς",
    "שלום עולם \u05e9\u05b8\u05c1 עברית123",
    "مرحبا بالعالم ١٢٣ مُحَمَّد \u200fRTL\u200e",
    "नमस्ते दुनिया क्षेत्र ज़ৰবাংলা தமிழ் తెలుగు",
    "ภาษาไทย สวัสดี ລາວ ខ្មែរ မြန်မာ",
    "😀😀 😃🚀 👩\u200d👩\u200d👧 👍🏽 🇩🇪🇫🇷 ☕️ ❤️\u200d🔥 1️⃣ 🙂1a",
    "a\u200bb\u200cc\u200dd\u2060e\ufefff\u00adg",
    "a\u00a0b\u3000c\u2028d\u2029e\u0085f\u2003g\u202fh\u205fi\u1680j",
    "\u00a0\u00a0a \u3000\u3000b \u2003 c\u00a0",
    "€100 £20 ¥3 ₹4 ©® ™ § ¶ † ‡ • … – — ″ ° ± × ÷ ≠ ≤ ∞ ∑ √ ← ↑ → ■ ▲ ★ ♥",
    "«bonjour» „hallo“ “hi” ‘x’ ¿qué? ¡no! 「あ」『い』（う）〜【え】",
    "!!! ??? ... ,,, --- ___ *** /// \\\\\\ ||| ~~~ ``` @@@ ### $$$ %%% ^^^ &&& +++ === <<< >>> ((())) [[[]]]",
    "a.b,c;d:e!f?g-h_i*j/k\\l|m~n`o@p#q$r%s^t&u+v=w<x>y(z)",
    " !a  ?b\n.c\r\n;d\t:e",
    "word\n\nword \n word\r\nword\r\rword \r\n \r\n word\n \n\n  \n",
    "trailing spaces   \n    leading spaces\n\n\n\n  mixed \t \t tabs",
    "a" * 60,
    " " * 37 + "x" + " " * 16,
    "\n" * 23 + "x" + "\t" * 9,
    "-" * 33 + "=" * 21,
    "Donaudampfschifffahrtsgesellschaftskapitänsmützenabzeichenverordnungsentwurfsvorlagenkommission",
    "ab" * 40,
    "0" * 50 + " " + "9" * 7,
    "\x00\x01\x02\x1b[31mred\x1b[0m\x7f\x80\x9f",
    "\ufffd\ufffd \ufffe \uffff \U0010ffff \ue000 \U000e0041 \U0001f1e6",
    "<s>hello</s> <s> </s><s></s>  <s>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n",
    "<|im_st <|im_start <|im|im_end|> <|im_end|",
    "<think>a<think> b </think> <thin k>",
    "[PAD7] [PAD8] <unk> <unk>x [UNK] <0x0A> <0x41>",
    "unmerged unmerged zzyzx Zzyzx ĿĿ ---- -----       x",
    "\u2581a \u2581\u2581 b\u2581 \u2581",
    "Ġhello ĊĊ Ã© â\u0080\u0099",
    "The  quick   brown    fox     jumps      over       the        lazy         dog.",
    "x=1;y=2;z=x+y;print(z)//comment\n/*block*/",
    "1st 2nd 3rd 4th 21st century 90s '90s 1990's 5'10\" 6ft.",
    "a1b2c3 1a2b3c A1 1A x86_64 h2o CO2 mp3 3D R2-D2 β2 2π 中1文2",
    "(a) [b] {c} <d> \"e\" 'f' `g` *h* _i_ ~j~",
    "e.g., i.e., etc. Mr. Dr. U.S.A. a.m. p.m. Ph.D. vs. No.1",
    "tag</b>text</i> a/b/c and/or //x\n/y\n\n/z",
    "\u0301a \u0301\u0301 \u0e34x \u0300\n",
    "𐐀𐐨 𝐀𝐁 𝟙𝟚 𠀀𠀁 𓀀 ꙮ ꜱ",
    "𝓗𝓮𝓵𝓵𝓸 ＡＢＣ ａｂｃ ﬁ ﬂ Ǆ Ⓐⓑ",
    "a\rb\r\nc\nd\u2028e\x0bf\x0cg",
    "...\n\n...  \n  ...\t\n",
    " 's 't 're 'S 'T 'RE\n's\t't",
    "日本 語 中 文 、。 ・ 한 글",
]
ALPHABET = [
    *"aAbBsStTeErRvVmMlLdD'’ \t\n\r0123456789.,!?-_/(<>@#$%^&*+=~`|\\\"",
    *(
        "\u00a0",
        "\u3000",
        "\u2028",
        "\u0085",
        "\u200b",
        "\u200d",
        "é",
        "e\u0301",
        "ß",
        "Ж",
        "ж",
        "中",
        "文",
        "の",
        "カ",
    ),
    *(
        "한",
        "\u1112",
        "\u1161",
        "א",
        "ع",
        "१",
        "٣",
        "Ⅷ",
        "½",
        "²",
        "😀",
        "👩\u200d🚀",
        "€",
        "«",
        "…",
        "。",
        "Ǆ",
        "ǅ",
        "ʰ",
    ),
    *(
        "\u0e01",
        "\u0e34",
        "𐐀",
        "\x00",
        "<s>",
        "</s>",
        "<|im_end|>",
        "▁",
        " the",
        "ing",
        "'s",
        "'LL",
        "  ",
        "\n\n",
        "12",
    ),
]
SPECIAL_FILES: list[tuple[dict[str, int], dict[str, int]]] = [
    ({"<|endoftext|>": CONTROL, "<|im_end|>": NORMAL, "</s>": NORMAL, "<|fim_pad|>": NORMAL}, {"eos_token_id": 258}),
    ({"<|start|>": CONTROL, "<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}, {"eos_token_id": 258}),
    ({"<|end|>": CONTROL, "<|calls|>": CONTROL, "<|flush|>": NORMAL, "<|channel|>": NORMAL}, {"eos_token_id": 256}),
    ({"<|end|>": CONTROL, "<|call|>": CONTROL, "<|message|>": CONTROL}, {"eos_token_id": 256}),
    ({"</s>": CONTROL, "<|tool_response>": CONTROL, "<turn|>": CONTROL, "<eos>": CONTROL}, {"eos_token_id": 259}),
    (
        {"stop": NORMAL, "turn": NORMAL, "message": NORMAL, "pad": NORMAL, "[PAD]": NORMAL, "<EOT>": USER_DEFINED},
        {"eos_token_id": 256, "eot_token_id": 257, "eom_token_id": 258, "fim_pad_token_id": 259},
    ),
    (
        {
            "<fim_prefix>": NORMAL,
            "<fim_suffix>": NORMAL,
            "<fim_middle>": NORMAL,
            "end": CONTROL,
            "<|file_sep|>": CONTROL,
        },
        {"eos_token_id": 259, "prefix_token_id": 256, "fim_suf_token_id": 259},
    ),
]


class Llama:
    """The tokenizer of a file that llama.cpp has read."""

    def __init__(self, metadata: dict[str, Any], folder: Path) -> None:
        file = folder / "vocabulary.gguf"
        write(file, metadata)
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
        self.vocab = llama_cpp.llama_model_get_vocab(self._model)

    def ids(self, text: str, add: bool, special: bool) -> list[int]:
        data = text.encode()
        found = (llama_cpp.llama_token * (len(data) + 8))()
        return list(found[: llama_cpp.llama_tokenize(self.vocab, data, len(data), found, len(found), add, special)])

    def having(self, attribute: str) -> list[int]:
        """Return the ids for which a function of the library, such as `is_eog`, is true."""
        function = getattr(llama_cpp, f"llama_vocab_{attribute}")
        return [index for index in range(llama_cpp.llama_vocab_n_tokens(self.vocab)) if function(self.vocab, index)]


def write(file: Path, metadata: dict[str, Any]) -> None:
    """Write a file without tensors; keys are those of the tokenizer."""
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in metadata.items():
        key = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def all_texts() -> list[str]:
    rng = random.Random(0)
    texts = list(TEXTS)
    while len(texts) < NUM_TEXTS:
        texts.append("".join(rng.choice(ALPHABET) for _ in range(rng.choice((2, 3, 5, 8, 16, 40)))))
    return texts


def merge_often(words: list[list[str]], num_merges: int) -> list[tuple[str, str]]:
    """Merge the most frequent pair again and again, but not to a special token; return the pairs."""
    merges: list[tuple[str, str]] = []
    for _ in range(num_merges):
        pairs = Counter(pair for word in words for pair in pairwise(word) if "".join(pair) not in SPECIAL)
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = [merged(word, best) for word in words]
    return merges


def merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    result: list[str] = []
    for symbol in word:
        if result and (result[-1], symbol) == pair:
            result[-1] += symbol
        else:
            result.append(symbol)
    return result


def byte_characters() -> list[str]:
    """Return the characters that stand for the bytes, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_level(texts: list[str]) -> dict[str, Any]:
    characters = byte_characters()
    merges = merge_often([[characters[byte] for byte in text.encode()] for text in texts], NUM_MERGES)
    return {"merges": [" ".join(pair) for pair in merges], "words": WORDS, "special": SPECIAL}


def byte_level_metadata(content: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a file; bos and eos are the first two special tokens."""
    tokens = byte_characters()
    tokens += dict.fromkeys(text.replace(" ", "") for text in content["merges"])
    tokens += [word for word in content["words"] if word not in tokens]
    types = [NORMAL] * len(tokens) + list(content["special"].values())
    first = len(tokens)
    tokens += content["special"]
    lists = {"tokens": tokens, "token_type": types, "merges": content["merges"]}
    return {"model": "gpt2", **lists, "bos_token_id": first, "eos_token_id": first + 1}


def byte_level_ids(metadata: dict[str, Any], texts: list[str], folder: Path) -> tuple[dict[str, int], list[Any]]:
    results: list[dict[str, Any]] = []
    splits = {}
    for name in SPLITS.split():
        llama = Llama(metadata | {"pre": name}, folder)
        result: dict[str, Any] = {"adds_bos": bool(llama_cpp.llama_vocab_get_add_bos(llama.vocab))}
        result |= ids_of(llama, texts, adds=False)
        if result not in results:
            results.append(result)
        splits[name] = results.index(result)
    first, *others = results
    for result in others:
        result["ids"] = [None if ids == same else ids for ids, same in zip(result["ids"], first["ids"])]
    return splits, results


def ids_of(llama: Llama, texts: list[str], adds: bool) -> dict[str, Any]:
    """Return the ids with special tokens parsed, and those without where they differ."""
    parsed = [llama.ids(text, adds, True) for text in texts]
    plain = [llama.ids(text, adds, False) for text in texts]
    return {"ids": parsed, "plain_ids": [None if ids == same else ids for ids, same in zip(plain, parsed)]}


def sentencepiece(texts: list[str]) -> list[tuple[str, float, int]]:
    """Return pieces with falling scores, and runs of spaces with equal ones, as in the vocabulary of Llama 2.

    As there, no pieces make a special token together; llama.cpp would merge them to it in texts without special tokens.
    """
    parts = [part for text in texts for part in re.split("|".join(map(re.escape, SPECIAL)), text)]
    words = [list("\u2581" + part.replace(" ", "\u2581")) for part in parts]
    frequent = Counter(char for word in words for char in word)
    merges = merge_often(words, NUM_PIECES)
    pieces: list[tuple[str, float, int]] = [("<unk>", 0, UNKNOWN), ("<s>", 0, CONTROL), ("</s>", 0, CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0, BYTE) for byte in range(256)]
    runs = {"\u2581" * length for length in range(2, 17)}
    known = {char for char, count in frequent.items() if count > 1 and char != "\0"}  # llama.cpp's texts end with it
    made = [text for text in dict.fromkeys(left + right for left, right in merges) if set(text) <= known]
    made += sorted(known)
    pieces += [(text, -float(index), NORMAL) for index, text in enumerate(made) if text not in runs]
    pieces += [(text, -1e9, NORMAL) for text in sorted(runs, key=lambda run: (len(run) % 5, len(run)))]
    return [*pieces, ("<think>", -1000, USER_DEFINED), ("<|im_end|>", -1000, NORMAL), ("[PAD7]", -10000, UNUSED)]


def sentencepiece_metadata(pieces: list[tuple[str, float, int]]) -> dict[str, Any]:
    texts, scores, types = map(list, zip(*pieces))
    return {"model": "llama", "tokens": texts, "scores": [float(score) for score in scores], "token_type": types}


def special_tokens(folder: Path) -> list[dict[str, Any]]:
    found = []
    for tokens, keys in SPECIAL_FILES:
        metadata = byte_level_metadata({"merges": ["a b"], "words": [], "special": {}})
        del metadata["bos_token_id"], metadata["eos_token_id"]
        metadata["tokens"] = metadata["tokens"][:256] + list(tokens)
        metadata["token_type"] = [NORMAL] * 256 + list(tokens.values())
        metadata["tokens"].append("ab")
        metadata["token_type"].append(NORMAL)
        llama = Llama(metadata | keys | {"pre": "gpt-2"}, folder)
        attributes = {"ends": llama.having("is_eog"), "control": llama.having("is_control")}
        found.append({"tokens": tokens, "keys": keys, **attributes})
    return found


def main() -> None:
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    texts = all_texts()
    content: dict[str, Any] = {"texts": texts, "byte_level": byte_level(texts), "sentencepiece": sentencepiece(texts)}
    with TemporaryDirectory() as name:
        folder = Path(name)
        metadata = byte_level_metadata(content["byte_level"])
        content["splits"], content["byte_level_ids"] = byte_level_ids(metadata, texts, folder)
        metadata = sentencepiece_metadata(content["sentencepiece"])
        content["variants"] = []
        for keys in VARIANTS:
            llama = Llama(metadata | keys, folder)
            content["variants"].append({"keys": keys, **ids_of(llama, texts, adds=True)})
        content["special_tokens"] = special_tokens(folder)
    FILE.write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
