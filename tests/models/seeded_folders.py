# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders in many forms, with weights from seeds, for the tests and for scripts/make_golden_folders.py.

They are made with NumPy only, so that the tests and the reference environment make the same folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = dict[str, tuple[str, Array]]
"""Tensors by their names: dtype as safetensors spells it, and float64 or integer values."""
Edit = Callable[[Tensors], None]

TOKENS = [5, 17, 3, 41, 8, 29, 29, 12, 0, 33, 7, 20]
ROWS = (0, 5, 11)
VOCAB, HIDDEN, WIDTH, EXPERT_WIDTH, NUM_EXPERTS, NUM_LAYERS = 48, 32, 40, 24, 4, 2
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 100.0,
    "tie_word_embeddings": True,
    "transformers_version": "5.0.0",
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_WIDTH}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {**_BASE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {**_BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "ernie4_5": {**_BASE, "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5"},
    "qwen3_moe": {
        **{**_BASE, **_EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
        **{"num_experts": NUM_EXPERTS, "mlp_only_layers": [0]},
    },
    "ernie4_5_moe": {
        **{**_BASE, "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe"},
        **{"moe_num_experts": NUM_EXPERTS, "moe_k": 2, "moe_intermediate_size": EXPERT_WIDTH},
        **{"moe_num_shared_experts": 1},
    },
    "glm4_moe": {
        **{**_BASE, **_EXPERTS, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"},
        **{"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1},
    },
}
_ITEMS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I8": "i1"}


@dataclass(frozen=True)
class Folder:
    """A checkpoint.

    Attributes:
        family: key of FAMILIES.
        config: changes of its config.json; values of "absent" leave a key out.
        edit: changes the tensors.
        write: writes the tensors into a folder.
        refused: begin of the message of the error, if the folder is not read.
    """

    name: str
    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    edit: tuple[Edit, ...] = ()
    write: Callable[[Path, Tensors], None] | None = None
    refused: str = ""

    def make(self, folder: Path) -> None:
        """Write the folder."""
        folder.mkdir(parents=True)
        config = {key: value for key, value in {**FAMILIES[self.family], **self.config}.items() if value != "absent"}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = make_tensors(self.family, HIDDEN // 4 if config.get("head_dim") is None else config["head_dim"])
        for edit in self.edit:
            edit(tensors)
        (self.write or write_whole)(folder, tensors)


def make_tensors(family: str, head_dim: int) -> Tensors:
    """Return the tensors of a family, tied, in bfloat16."""
    shapes = dict(_shapes(family, head_dim))
    return {name: ("BF16", values(name, shape)) for name, shape in shapes.items()}


def values(name: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Return values of bfloat16 that depend on the name and the seed."""
    noise = np.random.default_rng([seed, crc32(name.encode())]).standard_normal(shape)
    scale = 0.1 if len(shape) == 1 else float(shape[-1]) ** -0.5
    return _round(1.0 + 0.2 * noise if "norm" in name else noise * scale)


def _round(array: Array) -> Array:
    """Return the nearest values below that bfloat16 and float16 hold."""
    bits = array.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return np.where(np.abs(array) < 2**-14, 0.0, bits.view(np.float32).astype(np.float64))


def _shapes(family: str, head_dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for index in range(NUM_LAYERS):
        yield from layer_shapes(family, index, head_dim)


def layer_shapes(family: str, index: int, head_dim: int = 8) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor of a layer."""
    prefix, query, key = f"model.layers.{index}.", 4 * head_dim, 2 * head_dim
    yield f"{prefix}input_layernorm.weight", (HIDDEN,)
    yield f"{prefix}post_attention_layernorm.weight", (HIDDEN,)
    for name, size in (("q", query), ("k", key), ("v", key)):
        yield f"{prefix}self_attn.{name}_proj.weight", (size, HIDDEN)
        if family == "qwen2":
            yield f"{prefix}self_attn.{name}_proj.bias", (size,)
    yield f"{prefix}self_attn.o_proj.weight", (HIDDEN, query)
    if family.startswith("qwen3"):
        yield f"{prefix}self_attn.q_norm.weight", (head_dim,)
        yield f"{prefix}self_attn.k_norm.weight", (head_dim,)
    if index == 0 or not family.endswith("moe"):
        yield from _mlp_shapes(f"{prefix}mlp.", WIDTH)
        return
    yield f"{prefix}mlp.gate.weight", (NUM_EXPERTS, HIDDEN)
    for expert in range(NUM_EXPERTS):
        yield from _mlp_shapes(f"{prefix}mlp.experts.{expert}.", EXPERT_WIDTH)
    if family != "qwen3_moe":
        yield from _mlp_shapes(f"{prefix}mlp.shared_experts.", EXPERT_WIDTH)
    if family == "glm4_moe":
        yield f"{prefix}mlp.gate.e_score_correction_bias", (NUM_EXPERTS,)
    if family == "ernie4_5_moe":
        yield f"{prefix}mlp.moe_statics.e_score_correction_bias", (1, NUM_EXPERTS)


def _mlp_shapes(prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}gate_proj.weight", (width, HIDDEN)
    yield f"{prefix}up_proj.weight", (width, HIDDEN)
    yield f"{prefix}down_proj.weight", (HIDDEN, width)


def write_file(file: Path, tensors: Tensors) -> None:
    """Write a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, array) in sorted(tensors.items(), key=lambda item: (item[1][0], item[0])):
        stored = _to_bytes(dtype, array)
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + len(stored)]}
        data += stored
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _to_bytes(dtype: str, array: Array) -> bytes:
    if dtype == "BF16":
        return (array.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    return array.astype(_ITEMS[dtype]).tobytes()


def write_whole(folder: Path, tensors: Tensors) -> None:
    """Write model.safetensors."""
    write_file(folder / "model.safetensors", tensors)


def write_shards(entries: Mapping[str, str | None] | None = None) -> Callable[[Path, Tensors], None]:
    """Write two shards, and an index with these changed entries; None leaves a tensor out."""

    def write(folder: Path, tensors: Tensors) -> None:
        names = sorted(tensors)
        weight_map = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
        for file in set(weight_map.values()):
            write_file(folder / file, {name: tensors[name] for name in names if weight_map[name] == file})
        named = {name: file for name, file in {**weight_map, **(entries or {})}.items() if file}
        index = {"metadata": {"total_size": 1}, "weight_map": named}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


def stale_index(folder: Path, tensors: Tensors) -> None:
    """Write model.safetensors, and an index of shards that hold older weights."""
    write_shards()(folder, {name: (dtype, -array) for name, (dtype, array) in tensors.items()})
    write_whole(folder, tensors)


def two_files(folder: Path, tensors: Tensors) -> None:
    """Write two files without an index."""
    write_shards()(folder, tensors)
    (folder / "model.safetensors.index.json").unlink()


def add(name: str, shape: tuple[int, ...], dtype: str = "BF16", seed: int = 1) -> Edit:
    """Add a tensor with values of its own."""

    def edit(tensors: Tensors) -> None:
        tensors[name] = (dtype, values(name, shape, seed) if dtype[0] in "BF" else np.ones(shape))

    return edit


def head(dtype: str = "BF16") -> Edit:
    """Add a head that repeats the embedding."""

    def edit(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = (dtype, tensors["model.embed_tokens.weight"][1])

    return edit


def drop(name: str) -> Edit:
    """Leave out a tensor."""

    def edit(tensors: Tensors) -> None:
        del tensors[name]

    return edit


def rename(old: str, new: str) -> Edit:
    """Replace the beginning of names."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return edit


def store_as(dtype: str, part: str = "") -> Edit:
    """Store the tensors with this part in their names in another dtype."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if part in name]:
            tensors[name] = (dtype, tensors[name][1])

    return edit


def further_layer(name: str, index: int = NUM_LAYERS) -> Edit:
    """Add a layer of a family beyond the last one."""

    def edit(tensors: Tensors) -> None:
        for tensor, shape in layer_shapes(name, index):
            tensors[tensor] = ("BF16", values(tensor, shape))

    return edit


def mtp_layer(tensors: Tensors) -> None:
    """Add a layer for multi-token prediction of GLM 4.5."""
    further_layer("glm4_moe")(tensors)
    prefix = f"model.layers.{NUM_LAYERS}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        add(f"{prefix}{name}.weight", (HIDDEN,))(tensors)
    add(f"{prefix}eh_proj.weight", (HIDDEN, 2 * HIDDEN))(tensors)


def fuse_experts(tensors: Tensors) -> None:
    """Store all experts of a layer and projection as one tensor."""
    prefixes = {name.split("experts.0.")[0] + "experts." for name in tensors if "mlp.experts.0." in name}
    for prefix in prefixes:
        rows = [
            [tensors.pop(f"{prefix}{index}.{name}_proj.weight")[1] for name in ("gate", "up", "down")]
            for index in range(NUM_EXPERTS)
        ]
        tensors[f"{prefix}gate_up_proj"] = ("BF16", np.stack([np.concatenate(row[:2]) for row in rows]))
        tensors[f"{prefix}down_proj"] = ("BF16", np.stack([row[2] for row in rows]))


def transpose_fused(tensors: Tensors) -> None:
    """Store fused experts as [experts, in, out]."""
    fuse_experts(tensors)
    for name in [name for name in tensors if name.endswith("gate_up_proj")]:
        tensors[name] = ("BF16", tensors[name][1].swapaxes(1, 2))


UNTIED = {"tie_word_embeddings": False}
OWN_HEAD = add("lm_head.weight", (VOCAB, HIDDEN))
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 77.0}
BUFFERS = (
    add("model.layers.0.self_attn.rotary_emb.inv_freq", (4,), "F32"),
    add("model.rotary_emb.inv_freq", (4,), "F32"),
    add("model.embed_tokens.position_ids", (1, 64), "I64"),
    add("model.layers.1.self_attn.masked_bias", (1,)),
)
FIRST_SHARD, SECOND_SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FOLDERS = (
    # The head
    Folder("tied", "llama"),
    Folder("tied, with an equal head", "llama", edit=(head(),)),
    Folder("tied, with an equal head in float32", "llama", edit=(head("F32"),)),
    Folder("tied, with another head", "llama", edit=(OWN_HEAD,)),
    Folder("tied, with another head in float32", "llama", edit=(OWN_HEAD, store_as("F32", "lm_head"))),
    Folder("tied by default, with another head", "ernie4_5", {"tie_word_embeddings": "absent"}, (OWN_HEAD,)),
    Folder("tied, with another head and experts", "qwen3_moe", edit=(OWN_HEAD,)),
    Folder("tied, with a head alone", "qwen2", edit=(rename("model.embed_tokens", "lm_head"),)),
    Folder("untied", "qwen3", UNTIED, (OWN_HEAD,)),
    Folder("untied, without a head", "llama", UNTIED, refused="1 missing (lm_head.weight)"),
    Folder(
        "a head of another size",
        "llama",
        edit=(add("lm_head.weight", (VOCAB + 8, HIDDEN)),),
        refused="lm_head.weight is",
    ),
    # Names
    Folder("no prefix", "llama", edit=(rename("model.", ""),)),
    Folder("no prefix, another head", "qwen3", edit=(rename("model.", ""), OWN_HEAD)),
    Folder("no prefix, experts", "glm4_moe", edit=(rename("model.", ""),)),
    Folder("prefix twice", "llama", edit=(rename("model.", "model.model."),)),
    Folder(
        "prefix twice, head too",
        "llama",
        UNTIED,
        (OWN_HEAD, rename("model.", "model.model."), rename("lm_", "model.lm_")),
    ),
    Folder("buffers", "llama", edit=BUFFERS),
    Folder("a further layer", "llama", edit=(further_layer("llama"),)),
    Folder("a further layer with experts", "qwen3_moe", edit=(further_layer("qwen3_moe"),)),
    Folder("a layer for drafts", "glm4_moe", edit=(mtp_layer,)),
    Folder(
        "an unknown tensor",
        "llama",
        edit=(add("model.layers.0.self_attn.sink", (4,)),),
        refused="1 unexpected (model.layers.0.self_attn.sink)",
    ),
    # Indexes
    Folder("shards", "qwen2", write=write_shards()),
    Folder("a stale index", "llama", write=stale_index),
    Folder("an index that names a tied head", "llama", write=write_shards({"lm_head.weight": FIRST_SHARD})),
    Folder("an index that omits a tensor", "llama", write=write_shards({"model.norm.weight": None})),
    Folder(
        "an index that names other shards",
        "llama",
        write=write_shards({"model.norm.weight": FIRST_SHARD, "model.embed_tokens.weight": SECOND_SHARD}),
    ),
    Folder(
        "an index of a missing file",
        "llama",
        write=write_shards({"x": "y.safetensors"}),
        refused="names files that do not exist: y.safetensors",
    ),
    Folder("two files without an index", "llama", write=two_files, refused="contains 2 safetensors files but no"),
    # Dtypes
    Folder("float64", "llama", edit=(store_as("F64"),)),
    Folder("float64, named", "qwen3_moe", {"dtype": "float64"}, (store_as("F64"),)),
    Folder("float32", "llama", edit=(store_as("F32"),)),
    Folder("float16", "llama", edit=(store_as("F16"),)),
    Folder("bfloat16 with norms in float32", "llama", edit=(store_as("F32", "norm"),)),
    Folder("bfloat16, named float32", "llama", {"torch_dtype": "float32"}),
    Folder("a weight in int8", "llama", edit=(store_as("I8", "up_proj"),), refused="is stored as I8"),
    # Experts
    Folder("experts", "glm4_moe"),
    Folder("fused experts of Qwen 3", "qwen3_moe", edit=(fuse_experts,)),
    Folder("fused experts of ERNIE 4.5", "ernie4_5_moe", edit=(fuse_experts,)),
    Folder("fused experts of GLM 4.5, no prefix", "glm4_moe", edit=(fuse_experts, rename("model.", ""))),
    Folder("fused experts and a layer for drafts", "glm4_moe", edit=(mtp_layer, fuse_experts)),
    Folder(
        "fused experts of another shape",
        "qwen3_moe",
        edit=(transpose_fused,),
        refused="experts.gate_up_proj is [4, 32, 48], expected [4, 48, 32]",
    ),
    # Keys
    Folder("no head_dim, ERNIE 4.5 with experts", "ernie4_5_moe", {"head_dim": "absent"}),
    Folder("no head_dim, Qwen 3 with experts", "qwen3_moe", {"head_dim": "absent"}),
    Folder("no head_dim, GLM 4.5", "glm4_moe", {"head_dim": "absent", "partial_rotary_factor": None}),
    Folder("head_dim null, ERNIE 4.5", "ernie4_5", {"head_dim": None}),
    Folder("another number of experts", "qwen3_moe", {"num_experts": 7, "num_local_experts": NUM_EXPERTS}),
    Folder("rope_scaling beside rope_parameters", "llama", {"rope_parameters": YARN, "rope_scaling": LINEAR}),
    Folder(
        "rope_scaling beside rope_parameters, no rope_theta",
        "llama",
        {"rope_parameters": YARN, "rope_scaling": LINEAR, "rope_theta": "absent"},
    ),
    Folder(
        "yarn without factor",
        "llama",
        {"rope_scaling": {"rope_type": "yarn"}},
        refused="rope type 'yarn' needs a number 'factor'",
    ),
    Folder("yarn with factor null", "llama", {"rope_scaling": {**YARN, "factor": None}}),
    Folder("a sliding window of Llama", "llama", {"sliding_window": 4}),
    Folder("a sliding window of ERNIE", "ernie4_5_moe", {"sliding_window": 4, "use_sliding_window": True}),
)
