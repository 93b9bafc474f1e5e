# SPDX-License-Identifier: Apache-2.0
"""Write the tiny checkpoints tests/golden/paddlenlp_*: made, saved and computed by PaddleNLP itself.

PaddleNLP needs an environment of its own (the server never imports it, and the tests run without it):

    python3 -m venv pnlp
    pnlp/bin/pip install -r requirements-paddlenlp.txt paddlepaddle==3.3.1
    pnlp/bin/python scripts/make_paddlenlp_goldens.py

Each folder holds what PaddleNLP's `save_pretrained` wrote (config.json, generation_config.json, safetensors in one file
or in shards with their index) and a `reference.npz` with the float32 keys that `make_golden_checkpoints.py` describes:
Paddle has no bfloat16 matmul for the CPU, so there is no reference in bfloat16. `paddlenlp_tokenizers/*` are tiny
tokenizers that PaddleNLP saved, with `encoded.json`: texts and the ids that PaddleNLP gives them.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import paddle
import sentencepiece
import tokenizers
from paddlenlp.transformers import (
    ErnieTokenizer,
    GPTTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
PROMPT_LEN, GREEDY_LEN = 40, 12
POSITIONS = (0, 1, 7, 20, 39, 45, 51)
MAX_MODEL_LEN = 64
FAMILIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}
BASE: dict[str, Any] = {
    "vocab_size": 112,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
FUSED = {"fuse_attention_qkv": True, "fuse_attention_ffn": True}


@dataclass(frozen=True)
class Golden:
    """One checkpoint to write; `training` are settings that PaddleNLP applies but does not save."""

    name: str
    family: str
    config: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    stored: str = "bfloat16"
    max_shard_size: str = "10GB"


SQUARE = {"hidden_size": 40, "intermediate_size": 40, "num_key_value_heads": 4, "tie_word_embeddings": True}
GOLDENS = (
    Golden("paddlenlp_llama", "llama", max_shard_size="30KB"),
    Golden(
        "paddlenlp_llama_rope_linear",
        "llama",
        {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0, "rope_theta": 1000.0, "tie_word_embeddings": True},
        stored="float32",
    ),
    Golden("paddlenlp_llama_ntk", "llama", {"rope_scaling_type": "ntk", "rope_scaling_factor": 8.0}, FUSED),
    Golden("paddlenlp_qwen2_square", "qwen2", SQUARE),
    Golden("paddlenlp_qwen2_fused", "qwen2", {"num_attention_heads": 8}, FUSED, max_shard_size="30KB"),
)


def make_model(golden: Golden) -> Any:
    """Build the model in float32 with PaddleNLP's own initial values, to be replaced by `randomize`."""
    config_class, model_class = FAMILIES[golden.family]
    config = config_class(**{**BASE, **golden.config})
    for key, value in golden.training.items():
        setattr(config, key, value)
    model = model_class(config)
    model.eval()
    return model


def randomize(model: Any, generator: np.random.Generator) -> None:
    """Draw weights, all of them bfloat16 values, under which every part of the model moves the logits."""
    for name, weight in model.named_parameters():
        noise = generator.standard_normal(weight.shape, np.float32)
        if "norm" in name:
            value = (0.5 if name.endswith(".norm.weight") else 1.0) + 0.2 * noise
        elif weight.ndim == 1:
            value = 0.3 * noise
        else:
            fan_in = weight.shape[1] if "embed" in name else weight.shape[0]
            value = (0.5 if "o_proj" in name or "down_proj" in name else 1.0) * noise / fan_in**0.5
        weight.set_value(paddle.to_tensor(value.astype(np.float32)).astype("bfloat16").astype("float32"))


@paddle.no_grad()
def all_logits(model: Any, tokens: list[int]) -> np.ndarray:
    """Return float32 logits [T, V]."""
    output = model(paddle.to_tensor([tokens], "int64"))
    logits = output[0] if isinstance(output, tuple) else output
    found: np.ndarray = logits.reshape([-1, logits.shape[-1]]).numpy()
    assert found.shape[0] == len(tokens)
    return found


def reference(golden: Golden, model: Any) -> dict[str, np.ndarray]:
    """Run prompt and greedy continuation."""
    vocab_size = {**BASE, **golden.config}["vocab_size"]
    tokens = [int(token) for token in np.random.default_rng(7).integers(0, vocab_size, PROMPT_LEN)]
    for _ in range(GREEDY_LEN):
        tokens.append(int(all_logits(model, tokens)[-1].argmax()))
    logits = all_logits(model, tokens)
    best = np.sort(logits, -1)[:, :-3:-1]
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return {
        "tokens": np.array(tokens, np.int32),
        "prompt_len": np.int32(PROMPT_LEN),
        "max_model_len": np.int32(MAX_MODEL_LEN),
        "positions": np.array(POSITIONS, np.int32),
        "logprobs_float32": logprobs[list(POSITIONS)].astype(np.float32),
        "argmax_float32": logits.argmax(-1).astype(np.int32),
        "margin_float32": best[:, 0] - best[:, 1],
    }


def is_decisive(values: dict[str, np.ndarray]) -> bool:
    """Return whether the greedy tokens are far from ties."""
    return bool(values["margin_float32"][PROMPT_LEN - 1 :].min() > 1e-3)


def write_checkpoint(golden: Golden) -> None:
    """Make one folder from scratch."""
    model = make_model(golden)
    generator = np.random.default_rng(sum(golden.name.encode()))
    randomize(model, generator)
    while not is_decisive(values := reference(golden, model)):
        randomize(model, generator)
    folder = GOLDEN / golden.name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype=golden.stored)
    model.config.dtype = golden.stored
    model.save_pretrained(str(folder), safe_serialization=True, max_shard_size=golden.max_shard_size)
    np.savez_compressed(folder / "reference.npz", **values)


CORPUS = (
    "def add(a, b):\n    return a + b\n",
    "for name in names:\n    print(name, end=' ')\n",
    "The quick brown fox, 12345 times; it's DONE!",
    "héllo wörld, 你好 世界, привет мир, 🙂🙃 done. END of the text STOP",
    "深度学习框架 PaddlePaddle 3.0, we'll see what they've said",
)
ALPHABET = "abcdefgh THEN 0123456789 .,;!?'\"()\n\t  éüñ你好世界学习🙂\u00a0\u3000"


def texts() -> list[str]:
    """Return sentences and strings of random characters."""
    generator = random.Random(5)
    drawn = ["".join(generator.choice(ALPHABET) for _ in range(generator.randrange(1, 40))) for _ in range(60)]
    return [*CORPUS, " leading", "trailing ", "  ", "\n\n\n", "I'LL don't", *drawn]


def byte_level_files(folder: Path) -> None:
    """Train a byte-level BPE and write vocab.json and merges.txt."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.model.save(str(folder))


def sentencepiece_file(file: Path) -> None:
    """Train a SentencePiece model with Llama's settings."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(" ".join(CORPUS).splitlines() * 4),
        model_prefix=str(file.with_suffix("")),
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )


def word_piece_file(file: Path) -> None:
    """Write the vocabulary of a BERT-like tokenizer."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    characters = sorted(set("".join(CORPUS).lower()) - set(" \n"))
    pieces = [*special, *characters, *(f"##{character}" for character in characters), "the", "return", "##ing", "fox"]
    file.write_text("\n".join(pieces) + "\n", encoding="utf-8")


def write_tokenizers() -> None:
    """Make every folder of paddlenlp_tokenizers/ from scratch."""
    target = GOLDEN / "paddlenlp_tokenizers"
    shutil.rmtree(target, ignore_errors=True)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        byte_level_files(folder)
        sentencepiece_file(folder / "spm.model")
        word_piece_file(folder / "vocab.txt")
        pair = str(folder / "vocab.json"), str(folder / "merges.txt")
        made = {
            "llama": LlamaTokenizer(str(folder / "spm.model")),
            "qwen2": Qwen2Tokenizer(*pair, eos_token="!", unk_token="!", pad_token="!"),
            "gpt": GPTTokenizer(*pair, eos_token="!", unk_token="!", pad_token="!"),
            "ernie": ErnieTokenizer(str(folder / "vocab.txt")),
        }
        for name, tokenizer in made.items():
            tokenizer.save_pretrained(str(target / name))
            encoded = {text: [int(i) for i in tokenizer(text)["input_ids"]] for text in texts()}
            (target / name / "encoded.json").write_text(json.dumps(encoded, indent=0, ensure_ascii=False) + "\n")


def main() -> None:
    write_tokenizers()
    for golden in GOLDENS:
        write_checkpoint(golden)
        print(f"{golden.name}: {sum(f.stat().st_size for f in (GOLDEN / golden.name).iterdir()) / 1024:.0f} kB")


if __name__ == "__main__":
    main()
