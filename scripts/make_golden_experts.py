# SPDX-License-Identifier: Apache-2.0
"""Write the tiny checkpoints with experts under tests/golden/, with reference values computed by `transformers`.

Run in an environment with torch and transformers 5 (neither is needed to run the tests):

    python scripts/make_golden_experts.py

The folders are as those of make_golden_checkpoints.py. The weights are written by `save_pretrained`, which names each
expert's tensors as releases do. In every row and sparse layer, the score of the last chosen expert (and group) exceeds
that of the next one by MARGIN, so that other roundings choose the same experts.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_golden_checkpoints import (
    BASE,
    GOLDEN,
    MAX_MODEL_LEN,
    POSITIONS,
    Golden,
    is_decisive,
    rope,
    spelled,
    write_json,
)
from safetensors.torch import load_file, save_file
from transformers import (
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

PROMPT_LEN, GREEDY_LEN = 46, 6
MARGIN = {"softmax": 0.004, "sigmoid": 0.01}
MAX_TRIES = 200  # of a token, before other weights are drawn
Classes = Mapping[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]]
CLASSES: Classes = {
    "ernie4_5_moe": (Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
}
SMALL = {**BASE, "num_hidden_layers": 3, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class ExpertsGolden(Golden):
    """One checkpoint to write.

    Attributes:
        paddle: name of a further folder with the same weights in Paddle layout; "" for none.
        changes: keys of config.json that transformers does not write.
        removed: keys of config.json that transformers writes and releases do not have.
    """

    paddle: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


GOLDENS = (
    ExpertsGolden(
        "ernie4_5_moe",
        "ernie4_5_moe",
        {
            **{**SMALL, "num_attention_heads": 6, "use_bias": False},
            **{"moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
        },
        spelling=4,
        paddle="ernie4_5_moe_paddle",
        changes={"moe_use_aux_free": True, "moe_gate": "topk"},
    ),
    ExpertsGolden(
        "qwen3_moe",
        "qwen3_moe",
        {
            **{**SMALL, "tie_word_embeddings": False, "rope_parameters": rope("default", 1000000.0)},
            **{"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [0]},
        },
        spelling=4,
    ),
    ExpertsGolden(
        "qwen3_moe_plain_weights",
        "qwen3_moe",
        {**SMALL, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False, "decoder_sparse_step": 2},
    ),
    ExpertsGolden(
        "glm4_moe",
        "glm4_moe",
        {
            **{**SMALL, "num_attention_heads": 6, "use_qk_norm": True, "attention_bias": True},
            **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
            **{"routed_scaling_factor": 2.5, "tie_word_embeddings": False},
        },
        spelling=4,
        eos=[2, 5],
    ),
    ExpertsGolden(
        "glm4_moe_air",
        "glm4_moe",
        {
            **{**SMALL, "attention_bias": True, "rope_parameters": rope("default", 1e6, partial_rotary_factor=0.5)},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "tie_word_embeddings": False},
        },
        num_shards=3,
    ),
)


def is_router(name: str) -> bool:
    return ".gate." in name and "gate_proj" not in name


def randomize(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw weights under which every part of the model moves the logits: bfloat16 values, but for fp32 routers."""
    keeps_router = not isinstance(model, Qwen3MoeForCausalLM)  # whose gate has the model's dtype
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if "inv_freq" in name:
            continue
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            value = (0.3 if name == "model.norm.weight" else 1.0) + 0.1 * noise
        elif "e_score_correction_bias" in name:
            value = 0.2 * torch.rand(weight.shape, generator=generator) - 0.1
        elif weight.ndim == 1:
            value = 0.3 * noise
        else:
            gain = 1.5 if is_router(name) else 0.5 if ("o_proj" in name or "shared" in name) else 1.0
            value = gain * noise / weight.shape[-1] ** 0.5
        weight.data.copy_(value if keeps_router and is_router(name) else value.to(torch.bfloat16))


@torch.no_grad()
def run(model: PreTrainedModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 logits [T, V] and the margin of each row's experts [T]."""
    margins: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda m, _, out: margins.append(margin(m, out[0].float())))
        for router in routers_of(model)
    ]
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(margins).min(dim=0).values


def routers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if "Router" in type(module).__name__]


def uses_sigmoid(router: torch.nn.Module) -> bool:
    """Return whether the scores are sigmoids, as in GLM and DeepSeek-V3; ERNIE keeps its bias in another module."""
    return hasattr(router, "e_score_correction_bias")


def margin(router: torch.nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """Return by how much the score of the last chosen expert, and of its group, exceeds that of the next one."""
    statics = getattr(router, "moe_statics", router)
    bias = getattr(statics, "e_score_correction_bias", torch.zeros(1)).reshape(-1)
    scores = (logits.sigmoid() if uses_sigmoid(router) else logits.softmax(-1)) + bias
    found = torch.full(scores.shape[:1], 1.0)
    if getattr(router, "num_group", 1) > 1:
        num_counted = 1 if hasattr(router, "topk_method") else 2  # DeepSeek-V2 compares the groups' largest scores
        groups = scores.view(len(scores), router.num_group, -1).topk(num_counted, dim=-1).values.sum(-1)
        found = gap(groups, router.topk_group)
        kept = groups >= groups.topk(router.topk_group, dim=-1).values[:, -1:]
        scores = scores.masked_fill(~kept.repeat_interleave(scores.shape[1] // router.num_group, 1), float("-inf"))
    return torch.minimum(found, gap(scores, router.top_k))


def gap(scores: torch.Tensor, count: int) -> torch.Tensor:
    best = scores.topk(count + 1, dim=-1).values
    return best[:, -2] - best[:, -1]


def draw_tokens(model: PreTrainedModel, vocab_size: int, minimum: float) -> list[int] | None:
    """Return a prompt and its greedy continuation whose rows all have this margin; None if none is found."""
    rng, tokens = np.random.default_rng(7), list[int]()
    for _ in range(PROMPT_LEN):
        for _ in range(MAX_TRIES):
            candidate = int(rng.integers(0, vocab_size))
            if run(model, [*tokens, candidate])[1][-1] > minimum:
                tokens.append(candidate)
                break
        else:
            return None
    for _ in range(GREEDY_LEN):
        tokens.append(int(run(model, tokens)[0][-1].argmax()))
        if run(model, tokens)[1][-1] <= minimum:
            return None
    return tokens


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy in bfloat16, with routers as transformers loads them: float32, but for Qwen's."""
    low = copy.deepcopy(model).to(torch.bfloat16)
    low.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq
    if not isinstance(model, Qwen3MoeForCausalLM):
        wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, weight in (*low.named_parameters(), *low.named_buffers()):
            if is_router(name):
                weight.data = wanted[name].data
    return low


def reference(model: PreTrainedModel, tokens: list[int]) -> dict[str, np.ndarray]:
    """Run the tokens in both dtypes."""
    values: dict[str, np.ndarray] = {
        "tokens": np.array(tokens, np.int32),
        "prompt_len": np.int32(PROMPT_LEN),
        "max_model_len": np.int32(MAX_MODEL_LEN),
        "positions": np.array(POSITIONS, np.int32),
    }
    for name, stored, one in (("float32", np.float32, model), ("bfloat16", np.float16, in_bfloat16(model))):
        logits = run(one, tokens)[0]
        best = logits.topk(2, dim=-1).values
        values[f"logprobs_{name}"] = logits.log_softmax(-1)[list(POSITIONS)].numpy().astype(stored)
        values[f"argmax_{name}"] = logits.argmax(-1).numpy().astype(np.int32)
        values[f"margin_{name}"] = (best[:, 0] - best[:, 1]).numpy()
    return values


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors that `save_pretrained` writes; routers are in float32 unless bfloat16 has their values."""
    with tempfile.TemporaryDirectory() as folder:
        in_bfloat16(model).save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    return {name: smallest(tensor) if name.endswith("gate.weight") else tensor for name, tensor in tensors.items()}


def smallest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in bfloat16 if that has its values."""
    low = tensor.to(torch.bfloat16)
    return low if torch.equal(low.float(), tensor.float()) else tensor


def in_paddle_layout(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of an ERNIE checkpoint as Paddle writes them: transposed, q, k, v and gate, up fused."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        new = name.replace("model.", "ernie.", 1)
        is_linear = tensor.ndim == 2 and name.endswith(".weight") and "embed_tokens" not in name
        found[new] = tensor.t() if is_linear else tensor
    for parts, fused in (
        (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        (("gate_proj", "up_proj"), "up_gate_proj"),
    ):
        for first in [name for name in found if name.endswith(f".{parts[0]}.weight")]:
            names = [first.replace(parts[0], part) for part in parts]
            found[first.replace(parts[0], fused)] = torch.cat([found.pop(name) for name in names], dim=1)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def write_folder(golden: ExpertsGolden, config: dict[str, Any], values: dict[str, np.ndarray]) -> Path:
    """Write everything but the weights into an empty folder."""
    folder = GOLDEN / golden.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": golden.eos, "temperature": 0.6, "top_p": 0.95})
    np.savez_compressed(folder / "reference.npz", **values)
    return folder


def write_shards(tensors: dict[str, torch.Tensor], num_shards: int, folder: Path) -> None:
    """Write one file, or shards with their index."""
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = sorted(tensors)[shard::num_shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_checkpoint(
    golden: ExpertsGolden,
    classes: Classes = CLASSES,
    draw: Callable[[PreTrainedModel, torch.Generator], None] = randomize,
) -> None:
    """Make one folder from scratch, and one in Paddle layout if the golden asks for it."""
    config_class, model_class = classes[golden.family]
    config = config_class(**golden.config, attn_implementation="eager", experts_implementation="eager")
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(sum(golden.name.encode()))
    minimum = MARGIN["sigmoid" if uses_sigmoid(routers_of(model)[0]) else "softmax"]
    while True:
        draw(model, generator)
        tokens = draw_tokens(model, golden.config["vocab_size"], minimum)
        if tokens is not None and is_decisive(values := reference(model, tokens)):
            break
    tensors, raw = saved_tensors(model), {**spelled(golden, model), **golden.changes}
    raw = {key: value for key, value in raw.items() if key not in golden.removed}
    if golden.spelling == 4 and golden.family == "qwen3_moe":
        raw["num_experts"] = raw.pop("num_local_experts")
    write_shards(tensors, golden.num_shards, write_folder(golden, raw, values))
    if golden.paddle:
        raw = {key: value for key, value in raw.items() if key != "transformers_version"}
        folder = write_folder(replace(golden, name=golden.paddle), {**raw, "paddlenlp_version": "3.0.0"}, values)
        save_file(in_paddle_layout(tensors), folder / "model.safetensors", metadata={"format": "np"})


def print_size(name: str) -> None:
    print(f"{name}: {sum(f.stat().st_size for f in (GOLDEN / name).iterdir()) / 1024:.0f} kB", flush=True)


def main() -> None:
    for golden in GOLDENS:
        write_checkpoint(golden)
        for name in filter(None, (golden.name, golden.paddle)):
            print_size(name)


if __name__ == "__main__":
    main()
