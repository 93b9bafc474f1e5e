# SPDX-License-Identifier: Apache-2.0
"""The definition of trained draft heads in numpy: whole sequences, no cache, read from files in published formats.

Slot t + 1 holds token t + 1 and the target's state of token t, as for layers for multi-token prediction; slot 0 has no
state and takes no part in attention. The last token of a text is known, the target's state at it is not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = Mapping[str, Array]
_NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "BOOL": "?"}
_MLP_EPS = 1e-6


@dataclass(frozen=True)
class TargetView:
    """What a target of L layers and width H has computed for a text of n tokens; rows of later tokens are not read.

    Attributes:
        states: [>= n - 1, H], after the final norm.
        residuals: [L + 1, >= n - 1, H], the input of each layer, then the output of the last one, before any norm.
        embedding, head: [vocab, H].
    """

    states: Array
    residuals: Array
    embedding: Array
    head: Array


class Drafts(NamedTuple):
    """Greedy drafts.

    Attributes:
        ids: the drafts, tokens of the target.
        log_probs: [K, vocab of the target], -inf outside the draft vocabulary.
        states: [K, width], what the next draft reads of each draft; of Medusa, what its head reads.
    """

    ids: list[int]
    log_probs: Array
    states: Array


class DefinedHead:
    """Base of the definitions: the files of a head, in float64 or float32."""

    def __init__(self, folder: Path, dtype: str = "float64") -> None:
        raw = json.loads((folder / "config.json").read_text())
        self.dtype = np.dtype(dtype)
        self.is_speculators = "speculators_model_type" in raw
        self.config: dict[str, Any] = raw.get("transformer_layer_config", {}) | raw
        self.tensors: Tensors = {
            name: value.astype(self.dtype) if value.dtype.kind == "f" else value
            for name, value in read_tensors(folder / "model.safetensors").items()
        }

    def drafts(self, tokens: list[int], target: TargetView, num_drafts: int) -> Drafts:
        """Return num_drafts greedy drafts after `tokens`."""
        raise NotImplementedError

    def weight(self, name: str) -> Array:
        return self.tensors[f"{name}.weight"]

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.weight(name).T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def rms_norm(self, name: str, x: Array) -> Array:
        return normalized(x, self.config["rms_norm_eps"]) * self.weight(name)

    def own_or(self, name: str, of_target: Array) -> Array:
        """Return the head's own matrix of this name, or the target's."""
        return self.tensors.get(f"{name}.weight", of_target).astype(self.dtype)


class RecurrentHead(DefinedHead):
    """A head with attention, which reads its own output for all drafts but the first."""

    def __init__(self, folder: Path, dtype: str = "float64") -> None:
        super().__init__(folder, dtype)
        self.tensors = {renamed(name.removeprefix("model.")): value for name, value in self.tensors.items()}
        scaling = self.config.get("rope_scaling")
        if scaling and scaling.get("rope_type", scaling.get("type")) != "default":
            raise ValueError(f"the definition knows no scaled rotary angles, got rope_scaling {scaling}")

    def first_inputs(self, target: TargetView) -> Array:
        """Return the states [n, width] that the first draft reads."""
        raise NotImplementedError

    def first_layer(self, embedded: Array, states: Array) -> tuple[Array, Array]:
        """Return what attention of the first layer reads, and the residual stream [T, width] before it."""
        raise NotImplementedError

    def outputs(self, hidden: Array, target: TargetView) -> tuple[Array, Array]:
        """Return logits [vocab] of one row of the last layer's output [width], and its state for the next draft."""
        raise NotImplementedError

    def drafts(self, tokens: list[int], target: TargetView, num_drafts: int) -> Drafts:
        text, inputs = list(tokens), self.first_inputs(target)[: len(tokens) - 1]
        embedding = self.own_or("embed_tokens", target.embedding)
        log_probs, states = [], []
        for _ in range(num_drafts):
            hidden = self.hidden(embedding[text[1:]], inputs)
            logits, state = self.outputs(hidden[-1], target)
            text.append(int(logits.argmax()))
            inputs = np.concatenate([inputs, state[None]])
            log_probs.append(log_softmax(logits))
            states.append(state)
        return Drafts(text[len(tokens) :], np.stack(log_probs), np.stack(states))

    def hidden(self, embedded: Array, states: Array) -> Array:
        """Return the last layer's outputs [T, width] at slots 1 .. T."""
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            if layer == 0:
                read, x = self.first_layer(embedded, states)
            else:
                read = self.rms_norm(f"{name}.input_layernorm", x)
            x = x + self.attention(f"{name}.self_attn", read)
            y = self.rms_norm(f"{name}.post_attention_layernorm", x)
            gate = self.linear(f"{name}.mlp.gate_proj", y)
            x = x + self.linear(f"{name}.mlp.down_proj", silu(gate) * self.linear(f"{name}.mlp.up_proj", y))
        return x

    def attention(self, name: str, x: Array) -> Array:
        config, length = self.config, len(x)
        num_heads = config["num_attention_heads"]
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        dim = config.get("head_dim") or config["hidden_size"] // num_heads

        def heads(part: str, count: int) -> Array:
            y = self.linear(f"{name}.{part}_proj", x).reshape(length, count, dim)
            y = self.rms_norm(f"{name}.{part}_norm", y) if f"{name}.{part}_norm.weight" in self.tensors else y
            return y.transpose(1, 0, 2)

        query, key = self.rotated(heads("q", num_heads)), self.rotated(heads("k", num_kv_heads))
        key, value = (part.repeat(num_heads // num_kv_heads, axis=0) for part in (key, heads("v", num_kv_heads)))
        scores = query @ key.transpose(0, 2, 1) * dim**-0.5
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        attended = np.exp(log_softmax(scores)) @ value
        return self.linear(f"{name}.o_proj", attended.transpose(1, 0, 2).reshape(length, -1))

    def rotated(self, x: Array) -> Array:
        """Rotate the pairs (i, i + dim / 2) of every head [heads, T, dim]; row 0 is at position 1."""
        length, dim = x.shape[1:]
        theta = self.config.get("rope_theta") or (self.config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
        angles = np.outer(np.arange(1, length + 1), theta ** (-np.arange(0, dim, 2) / dim))
        cos, sin = np.cos(angles).astype(self.dtype), np.sin(angles).astype(self.dtype)
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class EagleHead(RecurrentHead):
    """EAGLE-1 and 2: no norm before the first layer's attention, none after the last layer, the target's head."""

    def first_inputs(self, target: TargetView) -> Array:
        return target.states.astype(self.dtype)

    def first_layer(self, embedded: Array, states: Array) -> tuple[Array, Array]:
        joined = self.linear("fc", np.concatenate([embedded, states], axis=-1))
        return joined, joined

    def outputs(self, hidden: Array, target: TargetView) -> tuple[Array, Array]:
        return hidden @ target.head.astype(self.dtype).T, hidden


class Eagle3Head(RecurrentHead):
    """EAGLE-3: states of several layers, two norms, a norm and a head of its own."""

    def first_inputs(self, target: TargetView) -> Array:
        if not self.uses_taps:
            return target.states.astype(self.dtype)
        if self.config.get("norm_before_fc") or self.config.get("eagle_config", {}).get("norm_before_fc"):
            raise ValueError("the definition knows no norm_before_fc")
        taps = [target.residuals[i].astype(self.dtype) for i in self.taps(len(target.residuals) - 1)]
        if self.config.get("fc_norm"):
            taps = [self.rms_norm(f"fc_norm.{i}", tap) for i, tap in enumerate(taps)]
        return self.linear("fc", np.concatenate(taps, axis=-1))

    @property
    def uses_taps(self) -> bool:
        return bool(self.config.get("eagle_config", {}).get("use_aux_hidden_state", True))

    def taps(self, num_layers: int) -> list[int]:
        """Return the layers whose inputs are read; num_layers stands for the output of the last one.

        The key at the top level counts inputs of layers, the same key in `eagle_config` their outputs.
        """
        key = "eagle_aux_hidden_state_layer_ids"
        inputs, outputs = self.config.get(key), self.config.get("eagle_config", {}).get(key)
        if inputs is not None:
            return list(inputs)
        return [2, num_layers // 2, num_layers - 3] if outputs is None else [layer + 1 for layer in outputs]

    def first_layer(self, embedded: Array, states: Array) -> tuple[Array, Array]:
        normed = self.rms_norm("layers.0.hidden_norm", states)
        read = np.concatenate([self.rms_norm("layers.0.input_layernorm", embedded), normed], axis=-1)
        # vLLM's defaults: speculators' files mean true if the key is missing, the others false.
        norm_first = self.config.get("norm_before_residual", self.is_speculators)
        return read, normed if norm_first else states

    def outputs(self, hidden: Array, target: TargetView) -> tuple[Array, Array]:
        normed = self.rms_norm("norm", hidden)
        logits = normed @ self.own_or("lm_head", target.head).T
        state = normed if self.config.get("norm_output") else hidden
        if "d2t" not in self.tensors:
            return logits, state
        ids = np.arange(len(logits)) + self.tensors["d2t"]
        return scattered(logits, ids, len(target.embedding)), state


class MLPSpeculatorHead(DefinedHead):
    """IBM's MLP speculator."""

    def drafts(self, tokens: list[int], target: TargetView, num_drafts: int) -> Drafts:
        config, state = self.config, target.states[len(tokens) - 2].astype(self.dtype)
        num_heads, width = config["n_predict"], config["inner_dim"] or config["emb_dim"]
        if num_drafts > num_heads:
            raise ValueError(f"the head makes {num_heads} drafts, not {num_drafts}")
        state_weight = 0.5 ** (0.5 / num_heads)
        embedding_weight = math.sqrt((1 - state_weight**2) * width / 2)
        if config["scale_input"]:
            state = normalized(state, _MLP_EPS) / math.sqrt(2)
        ids, log_probs, states = [tokens[-1]], [], []
        for i in range(num_drafts):
            part, projection = (0, min(i, 1)) if config["tie_weights"] else (i, i)
            embedded = self.weight(f"speculator.emb.{part}")[ids[-1]]
            state = self.linear(f"speculator.proj.{projection}", state) + embedding_weight / state_weight * embedded
            scale = f"speculator.ln.{part}"
            state = gelu(normalized(state, _MLP_EPS) * self.weight(scale) + self.tensors[f"{scale}.bias"])
            logits = self.linear(f"speculator.head.{part}", state)
            ids.append(int(logits.argmax()))
            log_probs.append(log_softmax(logits))
            states.append(state)
        return Drafts(ids[1:], np.stack(log_probs), np.stack(states))


class MedusaHead(DefinedHead):
    """Medusa, in the original form and in vLLM's."""

    def __init__(self, folder: Path, dtype: str = "float64") -> None:
        super().__init__(folder, dtype)
        self.tensors = {name.removeprefix("medusa_head."): value for name, value in self.tensors.items()}

    def drafts(self, tokens: list[int], target: TargetView, num_drafts: int) -> Drafts:
        state = target.states[len(tokens) - 2].astype(self.dtype)
        states = np.stack([self.block(i, state) for i in range(num_drafts)])
        logits = np.stack([self.logits(i, row, target) for i, row in enumerate(states)])
        return Drafts(logits.argmax(-1).tolist(), log_softmax(logits), states)

    def layers(self, head: int) -> list[str]:
        """Return the names of the residual layers of a head.

        Raises:
            ValueError: there is no such head.
        """
        forms = (f"blocks.{head}.layers.{{}}", f"{head}.{{}}.linear")
        for form in forms:
            names = [form.format(i) for i in range(len(self.tensors)) if f"{form.format(i)}.weight" in self.tensors]
            if names:
                return names
        raise ValueError(f"there is no head {head}")

    def block(self, head: int, x: Array) -> Array:
        for name in self.layers(head):
            x = x + silu(self.linear(name, x))
        return x

    def logits(self, head: int, x: Array, target: TargetView) -> Array:
        if self.config.get("original_lm_head"):
            matrix = self.own_or("lm_head", target.head)
        else:
            names = (f"lm_heads.{head}", f"{head}.{len(self.layers(head))}")
            matrix = next(self.weight(name) for name in names if f"{name}.weight" in self.tensors)
        logits = x @ matrix.T
        token_map = self.tensors.get("token_map")
        return logits if token_map is None else scattered(logits, token_map, len(target.embedding))


HEADS: dict[str, Callable[[Path, str], DefinedHead]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "mlp_speculator": MLPSpeculatorHead,
    "medusa": MedusaHead,
}


def read_tensors(path: Path) -> dict[str, Array]:
    """Return all tensors of a safetensors file, bfloat16 as float32."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        value = np.frombuffer(raw[start + begin : start + end], _NUMPY_TYPES[entry["dtype"]]).reshape(entry["shape"])
        is_bfloat16 = entry["dtype"] == "BF16"
        tensors[name] = (value.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else value
    return tensors


def renamed(name: str) -> str:
    """Return the usual name of a layer's tensor: the first layer of EAGLE-3 files is called `midlayer`."""
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def normalized(x: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)).astype(x.dtype)) / 2


def log_softmax(x: Array) -> Array:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def scattered(logits: Array, ids: Array, vocab_size: int) -> Array:
    """Return logits [vocab_size], -inf but for the given tokens."""
    all_logits = np.full(vocab_size, -np.inf, logits.dtype)
    all_logits[ids] = logits
    return all_logits
