# SPDX-License-Identifier: Apache-2.0
"""Write the tiny checkpoints under tests/golden/compressed_tensors/ with reference values computed by `transformers`.

Run in an environment with compressed-tensors 0.20, torch and transformers 5 (none is needed to run the tests):

    python scripts/make_compressed_tensors_files.py

Each model has random weights, which the package's own compressors quantize: its scales, codes, names of tensors and
config.json. The reference is what transformers computes in float32 with the weights as the package decompresses them
with scales in float32 (in bfloat16 it rounds each product):
    tokens    [T] int32
    rows      [R] int32       rows whose log-probabilities are stored
    logprobs  [R, V] float32
    digest    [16] uint8      of these weights in float32, those of modules with codes in the order of their names
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils.match import is_match, match_targets
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "golden" / "compressed_tensors"
VOCAB, NUM_TOKENS, ROWS = 96, 24, (0, 5, 12, 23)
BASE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
}
INPUTS = {"num_bits": 8, "strategy": "token", "dynamic": True}
STATIC_INPUTS = {"num_bits": 8, "strategy": "tensor", "dynamic": False}


def scheme(targets: list[str], bits: int, size: int | str, form: str = "", **options: Any) -> QuantizationScheme:
    """Return a scheme of integers.

    Args:
        size: of groups, or another strategy.
        form: name of the format, if each scheme has one.
        options: of `QuantizationScheme`, and `symmetric`.
    """
    shares = {"strategy": "group", "group_size": size} if isinstance(size, int) else {"strategy": size}
    weights = QuantizationArgs(num_bits=bits, symmetric=options.pop("symmetric", True), **shares)
    return QuantizationScheme(targets=targets, weights=weights, format=form or None, **options)


@dataclass
class Checkpoint:
    """A checkpoint to be made.

    Attributes:
        family: model_type of transformers.
        format: of the whole checkpoint.
        sizes: of the model, beside BASE.
        scales: dtype of the scales.
    """

    name: str
    family: str
    format: str
    schemes: list[QuantizationScheme]
    sizes: dict[str, Any]
    ignore: list[str] = field(default_factory=lambda: ["lm_head"])
    scales: torch.dtype = torch.bfloat16


PACK, INTS = "pack-quantized", "int-quantized"
ATTENTION = "re:.*self_attn\\.[qkvo]_proj$"
CHECKPOINTS = (
    Checkpoint(
        "llama_mixed",
        "llama",
        "mixed-precision",
        [
            scheme(["re:.*self_attn\\.(q|k|v|o)_proj$"], 4, 128, PACK),
            scheme(["re:.*mlp\\.(gate|up)_proj$"], 4, 64, PACK, symmetric=False),
            scheme(["re:.*down_proj$"], 8, "channel", INTS, input_activations=QuantizationArgs(**INPUTS)),
            scheme(["lm_head", "model.layers.1.self_attn.k_proj"], 8, "channel", PACK),
            scheme(["model.layers.1.self_attn.v_proj"], 8, 32, PACK, symmetric=False),
            scheme(["model.layers.1.mlp.up_proj"], 4, 16, PACK),
        ],
        {"hidden_size": 128, "intermediate_size": 128},
        ignore=["re:.*layers\\.0\\.self_attn\\.o_proj"],
    ),
    Checkpoint(
        "qwen2_asymmetric",
        "qwen2",
        PACK,
        [scheme(["Linear"], 4, 32, symmetric=False)],
        {"hidden_size": 32, "intermediate_size": 576, "tie_word_embeddings": True},
        scales=torch.float16,
    ),
    Checkpoint(
        "qwen3_float32_scales",
        "qwen3",
        PACK,
        [
            scheme(["Linear"], 4, 64),
            scheme([ATTENTION], 4, "channel", symmetric=False),
            scheme(["model.layers.0.self_attn.q_proj"], 4, "channel"),
            scheme(["lm_head"], 8, "tensor"),
        ],
        {"hidden_size": 64, "intermediate_size": 576, "num_hidden_layers": 1, "head_dim": 32},
        ignore=[],
        scales=torch.float32,
    ),
    Checkpoint(
        "qwen3_moe",
        "qwen3_moe",
        PACK,
        [scheme(["Linear"], 4, 32), scheme([ATTENTION], 8, "channel", symmetric=False)],
        {
            **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 4},
            **{"num_experts_per_tok": 2, "mlp_only_layers": [0], "head_dim": 32},
        },
        ignore=["lm_head", "re:.*mlp\\.gate$"],
    ),
    Checkpoint(
        "llama_w8a8",
        "llama",
        INTS,
        [scheme(["Linear"], 8, "channel", input_activations=QuantizationArgs(**INPUTS))],
        {"hidden_size": 64, "intermediate_size": 96},
    ),
    Checkpoint(
        "llama_w4a8",
        "llama",
        INTS,
        [
            scheme(
                ["Linear", "Embedding"], 4, 32, symmetric=False, input_activations=QuantizationArgs(**STATIC_INPUTS)
            ),
            scheme(["re:.*down_proj"], 8, 256, input_activations=QuantizationArgs(**STATIC_INPUTS)),
        ],
        {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1, "tie_word_embeddings": True},
        ignore=[],
    ),
)


def random_weights(folder: Path, made: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the weights of a model as transformers saves it, with random values in bfloat16."""
    config = AutoConfig.for_model(made.family, **(BASE | made.sizes))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    generator, weights = torch.Generator().manual_seed(len(made.name)), load_file(folder / "model.safetensors")
    for name, tensor in sorted(weights.items()):
        values = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 1:
            values = values * 0.1 + ("norm" in name)
        elif "embed" not in name or config.tie_word_embeddings:
            values = values * tensor.shape[-1] ** -0.5
        weights[name] = values.to(torch.bfloat16)
    return weights


def numbers_of(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and zero points of a weight, as the package calculates them."""
    if args.strategy == "tensor":
        low, high = weight.min().reshape(1), weight.max().reshape(1)
    else:
        groups = weight.reshape(weight.shape[0], -1, args.group_size or weight.shape[1])
        low, high = groups.amin(-1), groups.amax(-1)
    return calculate_qparams(low, high, args)


def compress(name: str, weight: torch.Tensor, made: Checkpoint) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
    """Return what the package stores of a module, and the weight for which it stands; None if it stays plain."""
    module = (torch.nn.Embedding if "embed" in name else torch.nn.Linear)(1, 1)
    targets = {target: scheme for scheme in made.schemes for target in scheme.targets}
    found = match_targets(name, module, targets)
    if weight.ndim != 2 or not found or is_match(name, module, made.ignore):
        return None
    of_module = targets[found[0]]
    compressor = BaseCompressor.get_value_from_registry(of_module.format or made.format)
    scales, zeros = numbers_of(weight.float(), of_module.weights)
    state = {"weight": weight.float(), "weight_scale": scales.to(made.scales).float(), "weight_zero_point": zeros}
    stored = compressor.compress(state, of_module)
    value = compressor.decompress(stored, of_module)["weight"]
    stored["weight_scale"] = stored["weight_scale"].to(made.scales)
    if of_module.input_activations is not None and not of_module.input_activations.dynamic:
        stored["input_scale"] = torch.full((1,), 0.05, dtype=torch.bfloat16)
    return {f"{name}.{part}": tensor.contiguous() for part, tensor in stored.items()}, value


def make(made: Checkpoint) -> None:
    """Write one checkpoint and its reference."""
    folder = FOLDER / made.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        plain = Path(temporary)
        stored, values, digest = dict[str, torch.Tensor](), dict[str, torch.Tensor](), blake2b(digest_size=16)
        for name, weight in sorted(random_weights(plain, made).items()):
            found = compress(name.removesuffix(".weight"), weight, made) if name.endswith(".weight") else None
            stored |= {name: weight} if found is None else found[0]
            values[name] = weight.float() if found is None else found[1]
            digest.update(b"" if found is None else found[1].contiguous().numpy().tobytes())
        save_file(values, plain / "model.safetensors", {"format": "pt"})
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((plain / "config.json").read_text())
        groups = {f"group_{index}": one for index, one in enumerate(made.schemes)}
        quantization = QuantizationConfig(
            config_groups=groups, format=made.format, quantization_status="compressed", ignore=made.ignore
        )
        config |= {"dtype": "bfloat16", "quantization_config": quantization.model_dump(mode="json")}
        (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
        write_reference(plain, folder / "reference.npz", np.frombuffer(digest.digest(), np.uint8))


def write_reference(plain: Path, file: Path, digest: np.ndarray) -> None:
    """Write the log-probabilities of some tokens."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = np.random.default_rng(5).integers(3, VOCAB, NUM_TOKENS).astype(np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    rows = np.array(ROWS, np.int32)
    logprobs = torch.log_softmax(logits, -1)[rows].numpy()
    np.savez_compressed(file, tokens=tokens, rows=rows, logprobs=logprobs, digest=digest)


if __name__ == "__main__":
    for one in CHECKPOINTS:
        make(one)
        size = sum(path.stat().st_size for path in (FOLDER / one.name).iterdir())
        print(f"{one.name}: {size / 1024:.0f} KiB")
