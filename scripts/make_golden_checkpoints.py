# SPDX-License-Identifier: Apache-2.0
"""Write the tiny checkpoints under tests/golden/ with reference values computed by `transformers`.

Run in an environment with torch and transformers 5 (neither is needed to run the tests):

    python scripts/make_golden_checkpoints.py

Each folder holds a checkpoint as users have them (config.json in the spelling of transformers 4 or 5, safetensors) and
`reference.npz`:
    tokens            [T] int32     a random prompt followed by the float32 model's greedy continuation
    prompt_len        []  int32
    max_model_len     []  int32     the context for which the rotary base of `dynamic` is fixed
    positions         [P] int32     rows whose log-probabilities are stored
    logprobs_<dtype>  [P, V]        float32 for float32, float16 for bfloat16
    argmax_<dtype>    [T] int32     of every row, fed with `tokens`
    margin_<dtype>    [T] float32   logit of the best id less that of the second
`rope_tables.npz` holds inverse frequencies and attention factors for many rotary settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
PROMPT_LEN, GREEDY_LEN = 40, 12
POSITIONS = (0, 1, 7, 20, 39, 45, 51)
MAX_MODEL_LEN = 64
CLASSES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "ernie4_5": (Ernie4_5Config, Ernie4_5ForCausalLM),
}


@dataclass(frozen=True)
class Golden:
    """One checkpoint to write."""

    name: str
    family: str
    config: dict[str, Any]
    spelling: int = 5
    stored: torch.dtype = torch.bfloat16
    num_shards: int = 1
    eos: int | list[int] = 2
    extra: dict[str, Any] = field(default_factory=dict)


BASE: dict[str, Any] = {
    "vocab_size": 112,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def rope(kind: str, theta: float, **values: Any) -> dict[str, Any]:
    """Return rope_parameters in the spelling of transformers 5."""
    return {"rope_type": kind, "rope_theta": theta, **values}


LLAMA3 = rope(
    "llama3", 10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
GOLDENS = (
    Golden(
        "llama_untied_bias",
        "llama",
        {
            **BASE,
            "hidden_size": 36,
            "num_attention_heads": 6,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
        },
        eos=[2, 5],
    ),
    Golden(
        "llama_rope_llama3", "llama", {**BASE, "num_key_value_heads": 4, "rope_parameters": LLAMA3}, 4, num_shards=3
    ),
    Golden(
        "llama_rope_linear", "llama", {**BASE, "rope_parameters": rope("linear", 1000.0, factor=4.0)}, 4, torch.float32
    ),
    Golden(
        "llama_rope_yarn",
        "llama",
        {**BASE, "rope_parameters": rope("yarn", 100.0, factor=4.0, original_max_position_embeddings=16)},
    ),
    Golden(
        "llama_rope_dynamic",
        "llama",
        {**BASE, "max_position_embeddings": 16, "rope_parameters": rope("dynamic", 100.0, factor=2.0)},
        4,
    ),
    Golden("llama_partial_rotary", "llama", {**BASE, "head_dim": 24, "partial_rotary_factor": 0.5}, 4, torch.float16),
    Golden(
        "qwen2",
        "qwen2",
        {
            **{key: value for key, value in BASE.items() if key != "head_dim"},
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
        },
        4,
    ),
    Golden("qwen3", "qwen3", {**BASE, "num_attention_heads": 6, "rope_parameters": rope("default", 1000000.0)}),
    Golden("ernie4_5", "ernie4_5", {**BASE, "num_attention_heads": 6, "use_bias": False}, 4),
    Golden("ernie4_5_bias", "ernie4_5", {**BASE, "use_bias": True}),
)


def randomize(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw weights, all of them bfloat16 values, under which every part of the model moves the logits.

    The scales keep the noise of a bfloat16 run below the tolerance of the tests.
    """
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            value = (0.5 if name == "model.norm.weight" else 1.0) + 0.2 * noise
        elif weight.ndim == 1:
            value = 0.3 * noise
        else:
            gain = 0.5 if ("o_proj" in name or "down_proj" in name) else 1.0
            value = gain * noise / weight.shape[-1] ** 0.5
        weight.data.copy_(value.to(torch.bfloat16))


def rotate_part(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rotation of the leading dimensions only, as the families with partial rotary do it."""

    def apply(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
        dim = cos.shape[-1]
        rotated = original(q[..., :dim], k[..., :dim], cos, sin, unsqueeze_dim)
        return tuple(torch.cat((part, x[..., dim:]), -1) for part, x in zip(rotated, (q, k), strict=True))  # type: ignore[return-value]

    return apply


def fix_rotary(golden: Golden, model: PreTrainedModel) -> None:
    """Fix what transformers leaves to the sequence at hand (dynamic) or to other families (partial rotary)."""
    embedding = model.model.rotary_emb
    parameters = golden.config.get("rope_parameters", {})
    partial = golden.config.get("partial_rotary_factor")
    if parameters.get("rope_type") == "dynamic":
        embedding.inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](model.config, seq_len=MAX_MODEL_LEN)
        embedding.rope_type = "default"  # no update per call
    if partial is not None:
        dim = int(golden.config["head_dim"] * partial)
        embedding.inv_freq = 1.0 / (10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        modeling_llama.apply_rotary_pos_emb = rotate_part(ORIGINAL_ROTATION)
    else:
        modeling_llama.apply_rotary_pos_emb = ORIGINAL_ROTATION


ORIGINAL_ROTATION = modeling_llama.apply_rotary_pos_emb


@torch.no_grad()
def all_logits(golden: Golden, model: PreTrainedModel, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return float32 logits [T, V] of a run in dtype."""
    frequencies = model.model.rotary_emb.inv_freq
    model = model.to(dtype)
    model.model.rotary_emb.inv_freq = frequencies  # stays float32, as in a model loaded in dtype
    fix_rotary(golden, model)
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    model.float()
    return logits


def reference(golden: Golden, model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Run prompt and greedy continuation in both dtypes."""
    rng = np.random.default_rng(7)
    tokens = [int(token) for token in rng.integers(0, golden.config["vocab_size"], PROMPT_LEN)]
    for _ in range(GREEDY_LEN):
        tokens.append(int(all_logits(golden, model, tokens, torch.float32)[-1].argmax()))
    values: dict[str, np.ndarray] = {
        "tokens": np.array(tokens, np.int32),
        "prompt_len": np.int32(PROMPT_LEN),
        "max_model_len": np.int32(MAX_MODEL_LEN),
        "positions": np.array(POSITIONS, np.int32),
    }
    for dtype, name, stored in ((torch.float32, "float32", np.float32), (torch.bfloat16, "bfloat16", np.float16)):
        logits = all_logits(golden, model, tokens, dtype)
        best = logits.topk(2, dim=-1).values
        values[f"logprobs_{name}"] = logits.log_softmax(-1)[list(POSITIONS)].numpy().astype(stored)
        values[f"argmax_{name}"] = logits.argmax(-1).numpy().astype(np.int32)
        values[f"margin_{name}"] = (best[:, 0] - best[:, 1]).numpy()
    return values


def is_decisive(values: dict[str, np.ndarray]) -> bool:
    """Return whether greedy tokens are far from ties, and transformers' own bfloat16 noise is well below 0.05."""
    margin = values["margin_float32"][PROMPT_LEN - 1 :].min()
    noise = np.abs(values["logprobs_bfloat16"].astype(np.float32) - values["logprobs_float32"]).max()
    return bool(margin > 1e-3 and noise < 0.02)


def spelled(golden: Golden, model: PreTrainedModel) -> dict[str, Any]:
    """Return config.json as transformers 5 writes it, or by hand as transformers 4 wrote it."""
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(golden.stored).removeprefix("torch.")
    parameters = config["rope_parameters"]
    if golden.spelling == 4:
        config["torch_dtype"] = config.pop("dtype")
        config["transformers_version"] = "4.52.4"
        del config["rope_parameters"]
        config["rope_theta"] = parameters.pop("rope_theta")
        if "partial_rotary_factor" in parameters:
            config["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
        config["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
        if parameters["rope_type"] in ("linear", "dynamic"):
            parameters["type"] = parameters.pop("rope_type")
    config["eos_token_id"] = 2
    return config


def write_weights(golden: Golden, model: PreTrainedModel, folder: Path) -> None:
    """Write one file, or shards with their index."""
    skip = {"lm_head.weight"} if golden.config["tie_word_embeddings"] else set()
    tensors = {k: v.to(golden.stored).contiguous() for k, v in model.state_dict().items() if k not in skip}
    if golden.num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(golden.num_shards):
        file = f"model-{shard + 1:05d}-of-{golden.num_shards:05d}.safetensors"
        part = names[shard :: golden.num_shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def write_checkpoint(golden: Golden) -> None:
    """Make one folder from scratch."""
    config_class, model_class = CLASSES[golden.family]
    model = model_class(config_class(**golden.config, attn_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(sum(golden.name.encode()))
    randomize(model, generator)
    while not is_decisive(values := reference(golden, model)):
        randomize(model, generator)
    folder = GOLDEN / golden.name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    write_json(folder / "config.json", spelled(golden, model))
    write_json(folder / "generation_config.json", {"eos_token_id": golden.eos, "temperature": 0.6, "top_p": 0.95})
    write_weights(golden, model, folder)
    np.savez_compressed(folder / "reference.npz", **values)


ROPE_SETTINGS: dict[str, dict[str, Any]] = {
    "default": rope("default", 10000.0),
    "linear": rope("linear", 10000.0, factor=2.5),
    "dynamic": rope("dynamic", 10000.0, factor=4.0),
    "llama3": rope(
        "llama3", 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
    "llama32": rope(
        "llama3",
        500000.0,
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    "yarn": rope("yarn", 1000000.0, factor=4.0, original_max_position_embeddings=32768),
    "yarn_betas": rope(
        "yarn", 10000.0, factor=40.0, original_max_position_embeddings=4096, beta_fast=16.0, beta_slow=2.0
    ),
    "yarn_mscale": rope(
        "yarn", 10000.0, factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.7
    ),
    "yarn_untruncated": rope(
        "yarn", 150000.0, factor=32.0, original_max_position_embeddings=4096, truncate=False, attention_factor=1.25
    ),
}
ROPE_SEQ_LEN = 100000


def write_rope_tables() -> None:
    """Store what transformers computes for each setting: head_dim 128, context 65536, dynamic at ROPE_SEQ_LEN."""
    values: dict[str, np.ndarray] = {}
    for name, parameters in ROPE_SETTINGS.items():
        config = LlamaConfig(
            hidden_size=256,
            num_attention_heads=2,
            head_dim=128,
            max_position_embeddings=65536,
            rope_parameters=dict(parameters),
        )
        if parameters["rope_type"] == "default":
            frequencies, factor = modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=ROPE_SEQ_LEN)
        values[f"{name}.inv_freq"] = frequencies.numpy()
        values[f"{name}.attention_factor"] = np.float64(factor)
        values[f"{name}.json"] = np.array(json.dumps(parameters))
    np.savez_compressed(GOLDEN / "rope_tables.npz", **values)


def main() -> None:
    for golden in GOLDENS:
        write_checkpoint(golden)
        print(f"{golden.name}: {sum(f.stat().st_size for f in (GOLDEN / golden.name).iterdir()) / 1024:.0f} kB")
    write_rope_tables()


if __name__ == "__main__":
    main()
