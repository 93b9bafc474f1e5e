# SPDX-License-Identifier: Apache-2.0
"""Recognizes what a drafting model is by the tensors of its checkpoint, and how many drafts it makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from fastdeploy.config.checkpoint_json import check_values, read_json_object
from fastdeploy.config.flag import integer
from fastdeploy.config.model_config import local_model_path
from fastdeploy.config.torch_files import read_head_headers
from fastdeploy.config.weight_files import StoredTensor
from fastdeploy.core.errors import ConfigError

PLANNED_METHODS = ("hydra", "peagle", "dflash", "dspark")
ERNIE_MARK = ".mtp_"  # in the name of every tensor of ERNIE's layer for multi-token prediction
MAX_LAYERS = 8  # of heads
MAX_DRAFTS = 1024  # of which a file may speak; more are an error of the file
_SPECULATORS = "speculators_model_type"  # says what a file in the format of speculators is
_LAYER = re.compile(r"(.*\.)?layers\.\d+\.")  # DeepSeek's layer for multi-token prediction is one with an eh_proj
_WEIGHTS = ("weight", "weight_packed", "qweight")  # of a linear layer: plain or FP8, compressed-tensors, AWQ or GPTQ
_MEDUSA = re.compile(r"(?:medusa_heads?\.)?(\d+)\.\d+\.linear\.weight|blocks\.(\d+)\.layers\.\d+\.weight")
_MLP_SPECULATOR = re.compile(r"(?:speculator\.)?emb\.\d+\.weight")
_LAYER_OF_EAGLE3 = re.compile(r"midlayer\..*|layers\.\d+\.hidden_norm\.weight")
_NORM_OF_KEYS = re.compile(r"layers\.\d+\.self_attn\.k_norm\.weight")
_FC, _HIDDEN_NORM, _FIRST_INPUT_NORM = "fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight"
_PREFIX = "model."  # of decoders; heads are stored with and without it
_MIN_TAPS = 3  # a layer of EAGLE joins an embedding and a state; one of EAGLE 3 usually as many states or more
_Tensors = Mapping[str, StoredTensor]
_DRAFTS = integer(1, MAX_DRAFTS)


def infer_method(model: str) -> str | None:
    """Return the method that drafts with `model` if it is a local folder; None if that is not known before a download.

    Raises:
        ConfigError: the folder has PyTorch files that are not valid, or a kind of head that is not known.
    """
    folder = local_model_path(model)
    return None if folder is None else infer_method_of(folder)


def infer_method_of(folder: Path) -> str:
    """Return the method that drafts with the checkpoint in `folder`.

    Its tensors decide: published heads call themselves `LlamaForCausalLM`. Only where they tell nothing does its
    config.json decide. A folder in which nothing can be read is taken for a draft model, whose loading says what is
    wrong.

    Raises:
        ConfigError: PyTorch files are not valid, or config.json names a kind of head that is not known.
    """
    config = _read_config(folder)
    if (kind := config.get(_SPECULATORS)) not in (None, *_KINDS):
        expected = f"expected one of {', '.join(_KINDS)}, got {kind!r:.80}"
        raise ConfigError("model", f"{folder / 'config.json'}: {_SPECULATORS}: {expected}")
    tensors = _bare_names(read_head_headers(folder))
    method = next((method for method, has_tensors in _HEADS.items() if has_tensors(tensors)), None)
    return method or _named_method(config, bool(tensors)) or _method_of_decoder(tensors)


def number_of_drafts(folder: Path, method: str) -> int | None:
    """Return how many drafts the checkpoint in `folder` is made for; None if it does not say so.

    Raises:
        ConfigError: its config.json is not valid; names the key.
    """
    file = folder / "config.json"
    config = read_json_object(file, "model") or {}
    if method == "medusa":  # `medusa_num_heads` is wrong in published files
        heads = filter(None, map(_MEDUSA.fullmatch, _bare_names(read_head_headers(folder))))
        return len({match[1] or match[2] for match in heads}) or None
    if method == "mlp_speculator":
        check_values(config, {"n_predict": _DRAFTS}, f"{file}: ")
        return config.get("n_predict")
    section = "speculators_config"
    match config.get(section):
        case {"proposal_methods": [{"speculative_tokens": _} as proposal, *_]}:
            check_values(proposal, {"speculative_tokens": _DRAFTS}, f"{file}: ", f"{section}.proposal_methods")
            return proposal["speculative_tokens"]
    return None


def refuse_head_as_model(folder: Path) -> None:
    """Refuse a trained head that is given as the model itself.

    Raises:
        ConfigError: says how to use it, and names its target if the files do.
    """
    config = _read_config(folder)
    num_layers = config.get("num_hidden_layers")
    if not config or (isinstance(num_layers, int) and num_layers > MAX_LAYERS):
        return
    try:
        method = infer_method_of(folder)
    except ConfigError:
        return  # reading it as a model says what is wrong
    if method in _HEADS:
        name = _target_of(config)
        target = f"its target, {name}," if name else "its target"
        problem = f"{folder} is a trained head for method {method!r}, not a model"
        raise ConfigError("model", f'{problem}; serve {target} with --speculative-config \'{{"model": "{folder}"}}\'')


def _target_of(config: Mapping[str, Any]) -> str:
    """Return the name of the model for which a head was trained; empty if its config.json does not say it."""
    match config:
        case {"speculators_config": {"verifier": {"name_or_path": str(name)}}} | {"base_model_name_or_path": str(name)}:
            return name[:120]
    return ""


def _bare_names(tensors: _Tensors) -> dict[str, StoredTensor]:
    """Return the tensors by their names without the prefix of decoders."""
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def _is_eagle3(tensors: _Tensors) -> bool:
    """Return whether a layer norms the state, or `fc` joins several states."""
    is_layer_marked = any(map(_LAYER_OF_EAGLE3.fullmatch, tensors))
    return is_layer_marked or (_num_joined(tensors) >= _MIN_TAPS and not _is_block_head(tensors))


def _is_eagle(tensors: _Tensors) -> bool:
    """Return whether `fc` joins an embedding and a state, which the first layer reads without a norm."""
    return _num_joined(tensors) == 2 and _FIRST_INPUT_NORM not in tensors and not _is_eagle3(tensors)


def _is_block_head(tensors: _Tensors) -> bool:
    """Return whether keys are normed, and one norm follows `fc`, whose output all layers read."""
    return _FC in tensors and _HIDDEN_NORM in tensors and any(map(_NORM_OF_KEYS.fullmatch, tensors))


def _num_joined(tensors: _Tensors) -> float:
    """Return how many vectors of its output's width `fc` reads; 0 without `fc`."""
    match tensors[_FC].shape if _FC in tensors else ():
        case (int(outputs), int(inputs)) if outputs > 0:
            return inputs / outputs
    return 0.0


def _has(tensors: Collection[str], beginning: str) -> bool:
    return any(name.startswith(beginning) for name in tensors)


_HEADS: Mapping[str, Callable[[_Tensors], bool]] = {
    "eagle": _is_eagle,
    "peagle": lambda tensors: _is_eagle3(tensors) and "mask_hidden" in tensors,
    "eagle3": _is_eagle3,
    "dspark": lambda tensors: _is_block_head(tensors) and _has(tensors, "markov_head."),
    "dflash": _is_block_head,
    "mlp_speculator": lambda tensors: any(map(_MLP_SPECULATOR.fullmatch, tensors)),
    "medusa": lambda tensors: any(map(_MEDUSA.fullmatch, tensors)),
    "hydra": lambda tensors: _has(tensors, "hydra_"),
}
"""Method -> whether these are the tensors of its head. The first method for which it holds is right."""
_KINDS = (*_HEADS, "mtp")


def _named_method(config: Mapping[str, Any], has_tensors: bool) -> str | None:
    """Return the method that config.json names, or None; names of architectures only count where no tensor does."""
    for key in (_SPECULATORS, "model_type"):
        if config.get(key) in _KINDS:
            return str(config[key])
    words = "" if has_tensors else f"{config.get('architectures')} {config.get('model_type')}".lower().replace("_", "")
    found = [method for method in _HEADS if method.replace("_", "") in words]
    return max(found, key=len, default=None)  # the name of EAGLE 3 contains that of EAGLE


def _method_of_decoder(tensors: Collection[str]) -> str:
    """Return `mtp` for layers for multi-token prediction alone, else `draft_model`."""
    layers = {match[0] for match in map(_LAYER.match, tensors) if match and not match[0].startswith("mtp.")}
    for_mtp = {layer for layer in layers if any(f"{layer}eh_proj.{weight}" in tensors for weight in _WEIGHTS)}
    has_mtp = for_mtp or "mtp.fc.weight" in tensors or any(ERNIE_MARK in f".{name}" for name in tensors)
    return "mtp" if has_mtp and layers == for_mtp else "draft_model"


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the JSON object in config.json; empty if there is none."""
    try:
        return read_json_object(folder / "config.json", "model") or {}
    except ConfigError:
        return {}
