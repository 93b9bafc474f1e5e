# SPDX-License-Identifier: Apache-2.0
"""Write the tiny checkpoints with latent attention under tests/golden/latent/, with values computed by `transformers`.

Run in an environment with torch and transformers 5.24 (neither is needed to run the tests; older releases lack the
factor of yarn in DeepSeek-V2's scores, or mask groups with 0):

    python scripts/make_golden_latent.py

The folders are as those of make_golden_experts.py and, for the layers for multi-token prediction, of
make_golden_mtp.py. Rows of q_a_proj and kv_a_proj that are normalised are drawn small, so that the epsilon of their
norms counts. Routers of DeepSeek have bfloat16 values, as in releases. latent_forms.npz has log-probabilities of some
rows for the folders of tests/models/latent_forms.py.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_golden_checkpoints import BASE, GOLDEN, rope
from make_golden_experts import (
    Classes,
    ExpertsGolden,
    is_router,
    print_size,
    randomize,
    routers_of,
    write_checkpoint,
)
from make_golden_mtp import Training, outputs, write_layer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_layers import MtpModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.models.latent_forms import FORMS, ROWS, TOKENS, write_form

CLASSES: Classes = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
}
LATENT_SCALE = 2.0**-7  # of what q_a_proj and kv_a_proj compute before a norm whose epsilon is 1e-6
SMALL = {
    **{key: value for key, value in BASE.items() if key != "head_dim"},
    "num_key_value_heads": BASE["num_attention_heads"],
    **{"num_hidden_layers": 3, "tie_word_embeddings": False, "first_k_dense_replace": 1, "moe_intermediate_size": 16},
}
LAYER_BIAS = 3.0  # of a layer for multi-token prediction, over that of its target
SHORT = {**SMALL, "num_hidden_layers": 2}
ORIGINAL_LEN = 32


def sizes(q_lora: int | None, kv_lora: int, nope: int, rotary: int, value: int) -> dict[str, Any]:
    return {
        **{"q_lora_rank": q_lora, "kv_lora_rank": kv_lora, "v_head_dim": value},
        **{"qk_nope_head_dim": nope, "qk_rope_head_dim": rotary},
    }


def experts(count: int, chosen: int, shared: int, num_groups: int, num_kept: int, scale: float) -> dict[str, Any]:
    return {
        **{"n_routed_experts": count, "num_experts_per_tok": chosen, "n_shared_experts": shared},
        **{"n_group": num_groups, "topk_group": num_kept, "routed_scaling_factor": scale},
    }


def yarn(factor: float, mscale: float, mscale_all_dim: float, theta: float = 100.0) -> dict[str, Any]:
    """Return rope_parameters of yarn; the small base gives frequencies between the two ends of its ramp."""
    values = {"beta_fast": 32, "beta_slow": 1, "mscale": mscale, "mscale_all_dim": mscale_all_dim}
    return rope("yarn", theta, factor=factor, original_max_position_embeddings=ORIGINAL_LEN, **values)


def released(kind: str, **parameters: Any) -> dict[str, Any]:
    """Return how releases spell the rotary setting and the rule of the router."""
    methods = {"deepseek_v2": "softmax", "deepseek_v3": "sigmoid"}
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_type", "rope_theta")}
    return {
        **{"rope_scaling": {**scaling, "type": "yarn"}, "scoring_func": methods[kind]},
        **{"moe_layer_freq": 1, "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001},
    }


V2_YARN, V3_YARN = yarn(40.0, 0.707, 0.707), yarn(40.0, 1.0, 1.0)
COMPUTED = ("head_dim", "qk_head_dim")  # written by transformers, not part of releases
GOLDENS = (
    ExpertsGolden(
        "latent/deepseek_v2",
        "deepseek_v2",
        {
            **{**SMALL, **sizes(24, 40, 16, 16, 24), **experts(12, 3, 2, 4, 2, 3.0)},
            **{"topk_method": "group_limited_greedy", "rope_parameters": V2_YARN, "max_position_embeddings": 1280},
        },
        spelling=4,
        num_shards=2,
        changes=released("deepseek_v2", **V2_YARN),
        removed=COMPUTED,
    ),
    ExpertsGolden(
        "latent/deepseek_v2_lite",
        "deepseek_v2",
        {
            **{**SMALL, **sizes(None, 32, 16, 8, 16), **experts(8, 2, 2, 1, 1, 1.0)},
            **{"topk_method": "greedy", "rope_parameters": V2_YARN, "max_position_embeddings": 1280},
        },
        spelling=4,
        changes=released("deepseek_v2", **V2_YARN),
        removed=COMPUTED,
    ),
    ExpertsGolden(
        "latent/deepseek_v3",
        "deepseek_v3",
        {
            **{**SMALL, **sizes(24, 32, 16, 16, 16), **experts(12, 3, 1, 3, 2, 2.5)},
            **{"rope_parameters": V3_YARN, "max_position_embeddings": 1280},
        },
        spelling=4,
        changes={**released("deepseek_v3", **V3_YARN), "topk_method": "noaux_tc", "num_nextn_predict_layers": 1},
        removed=(*COMPUTED, "rope_interleave"),
    ),
    ExpertsGolden(
        "latent/deepseek_v3_halves",
        "deepseek_v3",
        {
            **{**SHORT, **sizes(None, 48, 8, 16, 24), **experts(8, 2, 1, 1, 1, 1.5)},
            **{"rope_interleave": False, "attention_bias": True, "norm_topk_prob": False, "rms_norm_eps": 1e-5},
            **{"rope_parameters": yarn(4.0, 1.0, 0.4), "max_position_embeddings": 128},
        },
    ),
    ExpertsGolden(
        "latent/glm4_moe_lite",
        "glm4_moe_lite",
        {
            **{**SMALL, **sizes(24, 32, 24, 8, 32), **experts(8, 2, 1, 1, 1, 1.8)},
            "rope_parameters": rope("default", 1000000.0),
        },
        spelling=4,
        eos=[2, 5],
        changes={"topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0},
        removed=(*COMPUTED, "mlp_layer_types", "rope_interleave"),
    ),
    ExpertsGolden(
        "latent/glm4_moe_lite_bias",
        "glm4_moe_lite",
        {
            **{**SHORT, **sizes(16, 40, 24, 8, 32), **experts(8, 3, 1, 2, 1, 1.8)},
            **{"attention_bias": True, "rope_parameters": yarn(8.0, 0.6, 1.0), "max_position_embeddings": 256},
        },
    ),
)


def is_fixed(name: str) -> bool:
    """Return whether training leaves a weight of a layer for multi-token prediction as it is."""
    return is_router(name) or "_a_proj" in name


@torch.no_grad()
def prepare(module: torch.nn.Module) -> None:
    """Scale down what is normalised in latent attention, and round DeepSeek's routers."""
    for part in module.modules():
        if hasattr(part, "kv_a_proj_with_mqa"):
            for linear, count in ((part.kv_a_proj_with_mqa, part.kv_lora_rank), (part.q_a_proj, part.q_lora_rank)):
                for weight in () if linear is None else linear.parameters():
                    weight[:count] *= LATENT_SCALE
    for router in routers_of(module):
        if type(router).__name__.startswith("Deepseek"):
            router.weight.copy_(router.weight.to(torch.bfloat16))


@torch.no_grad()
def prepare_layer(layer: torch.nn.Module) -> None:
    """Prepare a layer for multi-token prediction, with biases that change choices of its router's larger scores."""
    prepare(layer)
    for router in routers_of(layer):
        router.e_score_correction_bias *= LAYER_BIAS


def draw(model: PreTrainedModel, generator: torch.Generator) -> None:
    randomize(model, generator)
    prepare(model)


def load(folder: Path) -> PreTrainedModel:
    """Return a model with what transformers needs to know about a layer for multi-token prediction."""
    config = AutoConfig.from_pretrained(folder)
    config.num_mtp_layers, config.mtp_mlp_layer_types = 1, ["sparse"]
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, **options).eval()


@torch.no_grad()
def check_names(name: str) -> None:
    """Raise AssertionError unless transformers reads the layer beside its target's tensors, and computes the same."""
    expected = np.load(GOLDEN / f"{name}_mtp" / "reference.npz")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        shutil.copytree(GOLDEN / name, path)
        tensors = {key: value for source in (name, f"{name}_mtp") for key, value in tensors_of(source).items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        target = load(path)
        target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{target.config.num_hidden_layers}.*"]
        mtp = MtpModel.from_pretrained(target)
        tokens = torch.tensor([expected["tokens"].tolist()])
        states = outputs(mtp, tokens[:, 1:], target.model(tokens, use_cache=False).last_hidden_state[:, :-1])
        found = mtp.shared_head(states).log_softmax(-1)[0, expected["positions"].tolist()]
    np.testing.assert_allclose(found.numpy(), expected["logprobs"], rtol=0, atol=1e-5)


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / name / "model.safetensors")


@torch.no_grad()
def write_forms() -> None:
    """Store log-probabilities of the folders that tests make from a seed."""
    values = {}
    for name in FORMS:
        with tempfile.TemporaryDirectory() as folder:
            model = load(write_form(Path(folder) / "model", name))
            logits = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
            values[name] = logits.log_softmax(-1)[list(ROWS)].numpy()
    np.savez_compressed(GOLDEN / "latent_forms.npz", **values)


def main() -> None:
    write_forms()
    for golden in GOLDENS:
        write_checkpoint(golden, CLASSES, draw)
        print_size(golden.name)
    for name in ("latent/deepseek_v3", "latent/glm4_moe_lite"):
        write_layer(load(GOLDEN / name), name, f"{name}_mtp", Training(150, 3, prepare_layer, is_fixed))
        check_names(name)
        print_size(f"{name}_mtp")


if __name__ == "__main__":
    main()
