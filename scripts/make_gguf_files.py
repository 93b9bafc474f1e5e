# SPDX-License-Identifier: Apache-2.0
"""Write the tiny GGUF files under tests/golden/gguf/ with reference values computed by `transformers`.

Run in an environment with gguf 0.19, torch and transformers 5 (none is needed to run the tests):

    python scripts/make_gguf_files.py [--float32 FOLDER]

Each model has random weights. They are written as llama.cpp's converter would: its names, keys, shapes and order of
rows. The reference is what transformers computes in float32 with the weights of the file, dequantized by `gguf`:
    tokens    [T] int32
    rows      [R] int32       rows whose log-probabilities are stored
    logprobs  [R, V] float32
    config    JSON            config.json of the model of transformers

`--float32` writes all models once more with float32 weights, for check_gguf_files.py, which compares them with
llama.cpp itself: its kernels for other types round the activations. glm4moe_mtp.gguf holds the weights of
tests/golden/glm4_moe and glm4_moe_mtp.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf_conversion import File, convert
from safetensors.torch import load_file, save_file
from transformers import (
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
VOCAB, NUM_TOKENS, ROWS = 264, 24, (0, 5, 12, 23)
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "ernie4_5": (Ernie4_5Config, Ernie4_5ForCausalLM),
    "ernie4_5-moe": (Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM),
    "glm4moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
}
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 262,
    "eos_token_id": 263,
}
WIDE = {"hidden_size": 256, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
ERNIE_EXPERTS = {
    **{"moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2},
    **{"moe_layer_start_index": 1, "moe_layer_interval": 1},
}
GLM = {
    **EXPERTS,
    **{"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    **{"partial_rotary_factor": 0.5, "num_nextn_predict_layers": 0, "tie_word_embeddings": False},
}
GROUPS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"]
KS = ["Q4_K", "Q6_K", "Q3_K", "Q5_K", "Q2_K"]
RARE = [
    *("IQ4_XS", "IQ2_XXS", "IQ3_S", "TQ2_0", "IQ2_S", "IQ1_M", "IQ4_NL", "IQ3_XXS", "TQ1_0"),
    *("IQ2_XS", "MXFP4", "IQ1_S", "NVFP4"),
]


def rope(kind: str, theta: float, **values: Any) -> dict[str, Any]:
    """Return rope_parameters of transformers 5."""
    return {"rope_type": kind, "rope_theta": theta, **values}


LLAMA3 = rope(
    "llama3", 10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = rope("yarn", 1000.0, factor=4.0, original_max_position_embeddings=32, beta_fast=16.0, beta_slow=2.0)


SAMPLING = {
    "general.sampling.temp": 0.7,
    "general.sampling.top_k": 20,
    "general.sampling.top_p": 0.95,
    "general.sampling.penalty_repeat": 1.05,
}
FILES = (
    File("llama_f32", "llama", ["F32"], {"rope_parameters": LLAMA3, "intermediate_size": 32}),
    File(
        "llama_groups",
        "llama",
        GROUPS,
        {
            **{"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
            "rope_parameters": rope("linear", 1000.0, factor=4.0),
        },
        table="Q8_0",
        tokenizer="llama",
    ),
    File(
        "llama_k",
        "llama",
        KS,
        {**WIDE, "num_key_value_heads": 2, "rope_parameters": LLAMA3},
        table="Q6_K",
        tokenizer="smollm",
    ),
    File("llama_rare", "llama", RARE, {**WIDE, "num_hidden_layers": 3}, table="Q2_K"),
    File("qwen2_q8_0", "qwen2", ["Q8_0"], {"head_dim": 8}, tokenizer="qwen2", extra=SAMPLING),
    File(
        "qwen2_k",
        "qwen2",
        KS,
        {**WIDE, "num_attention_heads": 16, "num_key_value_heads": 2, "num_hidden_layers": 1},
        "Q4_K",
        "qwen2",
    ),
    File("qwen3_q5_0", "qwen3", ["Q5_0", "Q5_0", "Q8_0"], {"rope_parameters": YARN}, tokenizer="qwen2"),
    File("qwen3_k", "qwen3", KS, {**WIDE, "rope_parameters": YARN}, "Q2_K", "qwen2"),
    File("qwen3moe_groups", "qwen3moe", GROUPS, {**EXPERTS, "num_experts": 4, "norm_topk_prob": True}, "", "qwen2"),
    File(
        "qwen3moe_k",
        "qwen3moe",
        KS,
        {**WIDE, **EXPERTS, "num_experts": 3, "norm_topk_prob": True, "num_hidden_layers": 1},
        "Q3_K",
        "qwen2",
    ),
    File("ernie4_5_q4_1", "ernie4_5", ["Q4_1"], table="Q8_0", tokenizer="llama"),
    File("ernie4_5_k", "ernie4_5", KS, {**WIDE, "tie_word_embeddings": False}, "Q2_K", "llama"),
    File("ernie4_5_moe_groups", "ernie4_5-moe", GROUPS, ERNIE_EXPERTS, "Q5_1", "llama"),
    File(
        "ernie4_5_moe_k",
        "ernie4_5-moe",
        KS,
        {**WIDE, **ERNIE_EXPERTS, "moe_num_experts": 3, "moe_num_shared_experts": 1},
        "Q2_K",
        "llama",
    ),
    File(
        "glm4moe_groups",
        "glm4moe",
        GROUPS,
        {**GLM, "attention_bias": True, "use_qk_norm": True, "n_group": 2, "n_routed_experts": 8},
        tokenizer="glm4",
    ),
    File(
        "glm4moe_k", "glm4moe", KS, {**WIDE, **GLM, "n_routed_experts": 3, "tie_word_embeddings": True}, "Q2_K", "glm4"
    ),
)


def random_model(file: File, seed: int) -> PreTrainedModel:
    """Return a model with random weights that are neither small nor chaotic."""
    make_config, make_model = CLASSES[file.family]
    torch.manual_seed(seed)
    model: PreTrainedModel = make_model(make_config(**{**BASE, **file.config})).float().eval()
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        noise = torch.randn(weight.shape)
        if name.endswith("inv_freq"):
            continue
        if "norm" in name:
            weight.data.copy_(1.0 + 0.2 * noise)
        elif "correction_bias" in name:
            weight.data.copy_(0.1 * noise)
        elif weight.ndim == 1:
            weight.data.copy_(0.3 * noise)
        else:
            weight.data.copy_((2.0 if ".gate.weight" in name else 1.0) * noise / weight.shape[-1] ** 0.5)
    return model


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint as float32."""
    return {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}


@torch.no_grad()
def reference(model: PreTrainedModel, tensors: dict[str, np.ndarray], family: str) -> dict[str, np.ndarray]:
    """Return what transformers computes with these weights."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_file({name: torch.tensor(values) for name, values in tensors.items()}, f"{folder}/model.safetensors")
        loaded, info = CLASSES[family][1].from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        config = json.loads((Path(folder) / "config.json").read_text())
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    config["architectures"] = [type(model).__name__]
    tokens = np.random.default_rng(7).integers(0, model.config.vocab_size, NUM_TOKENS)
    logits = loaded.eval()(torch.tensor(tokens[None]), use_cache=False).logits[0]
    return {
        "tokens": tokens.astype(np.int32),
        "rows": np.array(ROWS, np.int32),
        "logprobs": logits.log_softmax(-1)[list(ROWS)].numpy(),
        "config": np.array(json.dumps(config)),
    }


def write(file: File, seed: int, folder: Path, kinds: list[str]) -> None:
    """Write a file and its reference."""
    model = random_model(file, seed)
    with tempfile.TemporaryDirectory() as checkpoint:
        model.save_pretrained(checkpoint)
        tensors = arrays(Path(checkpoint))
    converter = convert(file, folder / f"{file.name}.gguf", tensors, model.config, kinds)
    values = reference(model, converter.dequantized, file.family)
    np.savez_compressed(folder / f"{file.name}.npz", **values)
    spread = np.ptp(values["logprobs"], axis=-1).min()
    sizes = [(folder / f"{file.name}.{ending}").stat().st_size for ending in ("gguf", "npz")]
    print(f"{file.name}: {sizes[0]} + {sizes[1]} bytes, log-probabilities differ by {spread:.1f}", flush=True)


def write_mtp(folder: Path) -> None:
    """Write a golden model with its layer for multi-token prediction, all values kept."""
    config = Glm4MoeConfig(**json.loads((GOLDEN / "glm4_moe" / "config.json").read_text()))
    tensors = {**arrays(GOLDEN / "glm4_moe"), **arrays(GOLDEN / "glm4_moe_mtp")}
    file = File("glm4moe_mtp", "glm4moe", ["BF16"], tokenizer="glm4")
    converter = convert(file, folder / f"{file.name}.gguf", tensors, config, file.kinds)
    assert all(np.array_equal(tensors[name], found) for name, found in converter.dequantized.items())


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--float32", type=Path, help="folder for the same models with float32 weights")
    args = parser.parse_args()
    folder = GOLDEN / "gguf"
    folder.mkdir(exist_ok=True)
    for seed, file in enumerate(FILES):
        write(file, seed, folder, file.kinds)
        if args.float32:
            write(file, seed, args.float32, ["F32"])
    write_mtp(folder)


if __name__ == "__main__":
    main()
