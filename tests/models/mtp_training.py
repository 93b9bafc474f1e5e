# SPDX-License-Identifier: Apache-2.0
"""The definition of layers for multi-token prediction in Paddle operators, which can be trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
from numpy.typing import NDArray
from paddle import Tensor
from safetensors.paddle import load_file, save_file

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.speculative_config import MTPConfig, NaiveConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.models.loader import load_model
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.caches import allocate_cache
from tests.exactness.requests import run_all

DEMO = Path(resolve_model_path("demo"))
ERNIE = {
    "enorm": "model.mtp_emb_norm.{0}",
    "hnorm": "model.mtp_hidden_norm.{0}",
    "eh_proj": "model.mtp_linear_proj.{0}",
    "block": "model.mtp_block.{0}",
}
DEEPSEEK = {
    **{part: f"model.layers.{{1}}.{part}" for part in ("enorm", "hnorm", "eh_proj")},
    "block": "model.layers.{1}",
    "norm": "model.layers.{1}.shared_head.norm",
    "head": "model.layers.{1}.shared_head.head",
    "embedding": "model.layers.{1}.embed_tokens",
}
Tensors = dict[str, Tensor]
Counts = NDArray[np.int64]  # [2, number of drafts], drafted and accepted tokens by position
FORMS = {"ernie": ERNIE, "ernie_raw": ERNIE, "deepseek": DEEPSEEK}
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LINEARS = (*LINEARS, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class DefinedLayer:
    """A layer for multi-token prediction in one of the forms of checkpoints; float32, whole sequences, no cache.

    Attributes:
        form: a key of FORMS.
        weights: the layer's tensors by their names in a checkpoint, linear layers [out, in].
        hidden_state: `normed` or `raw`, the states that the layer reads.
    """

    def __init__(
        self, form: str, config: ModelConfig, seed: int, index: int = 0, target: Tensors | None = None
    ) -> None:
        """Draw random weights for layer `index`; its own head, embedding and norm start as the target's.

        Args:
            target: tensors of the target, by default those of `target_tensors`.
        """
        paddle.seed(seed)
        self.form = form
        self.names = {part: name.format(index, config.num_layers + index) for part, name in FORMS[form].items()}
        self.config = config
        self.hidden_state = "raw" if form == "ernie_raw" else "normed"
        stored = target_tensors() if target is None else target
        names = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
        self.target = {part: stored[f"{name}.weight"].astype("float32") for part, name in names.items()}
        weights = {f"{self.names['block']}.{name}": weight for name, weight in self.draw_block(stored).items()}
        hidden = config.hidden_size
        weights[f"{self.names['eh_proj']}.weight"] = draw((hidden, 2 * hidden))
        weights |= {f"{self.names[norm]}.weight": paddle.ones([hidden]) for norm in ("enorm", "hnorm")}
        if form == "deepseek":
            weights |= {f"{self.names[part]}.weight": weight.clone() for part, weight in self.target.items()}
        self.weights = weights

    def draw_block(self, target: Tensors) -> Tensors:
        """Return random weights of the decoder layer, by their names in it."""
        config = self.config
        hidden, kv = config.hidden_size, config.num_kv_heads * config.head_dim
        inner, query = config.intermediate_size, config.num_heads * config.head_dim
        sizes = [(query, hidden), (kv, hidden), (kv, hidden), (hidden, query)]
        sizes += [(inner, hidden), (inner, hidden), (hidden, inner)]
        weights = {f"{name}.weight": draw(size) for name, size in zip(LINEARS, sizes)}
        norms = ("input_layernorm", "post_attention_layernorm")
        return weights | {f"{name}.weight": paddle.ones([hidden]) for name in norms}

    def trained_weights(self) -> list[Tensor]:
        return list(self.weights.values())

    def weight(self, name: str) -> Tensor:
        """Return the weight of a part; the target's weight if the form shares it."""
        if name in self.target and name not in self.names:
            return self.target[name]
        own = self.names.get(name, f"{self.names['block']}.{name}")
        return self.weights[f"{own}.weight"]

    def states(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Return the layer's output states [B, T, hidden] for tokens 1 .. T and states 0 .. T - 1.

        They replace `states` for the next draft: after the final norm, which is the layer's own in DeepSeek's form, if
        `hidden_state` is `normed`, else before it.
        """
        embedded = self.norm("enorm", F.embedding(tokens, self.weight("embedding")))
        x = self.linear("eh_proj", paddle.concat([embedded, self.norm("hnorm", states)], axis=-1))
        x = x + self.attention(self.norm("input_layernorm", x))
        x = x + self.mlp(self.norm("post_attention_layernorm", x))
        return self.norm("norm", x) if self.hidden_state == "normed" else x

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [B, T, vocab] of output states."""
        return self.linear("head", states if self.hidden_state == "normed" else self.norm("norm", states))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt() * self.weight(name)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return paddle.matmul(x, self.weight(name), transpose_y=True)

    def mlp(self, x: Tensor, name: str = "mlp") -> Tensor:
        gated = F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gated)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        dim, groups = self.config.head_dim, self.config.num_kv_heads

        def heads(name: str) -> Tensor:
            return self.linear(name, x).reshape([batch, length, -1, dim]).transpose([0, 2, 1, 3])

        query, key = self.rotate(heads("self_attn.q_proj")), self.rotate(heads("self_attn.k_proj"))
        key, value = (
            part.repeat_interleave(self.config.num_heads // groups, axis=1) for part in (key, heads("self_attn.v_proj"))
        )
        return self.attend(query, key, value, dim**-0.5)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return the output of attention for queries, keys and values [B, heads, T, dim]."""
        batch, _, length, _ = query.shape
        scores = paddle.matmul(query, key, transpose_y=True) * scale
        hidden = paddle.triu(paddle.full([length, length], -1e9), 1)
        attended = paddle.matmul(F.softmax(scores + hidden), value)
        return self.linear("self_attn.o_proj", attended.transpose([0, 2, 1, 3]).reshape([batch, length, -1]))

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the pairs (2i, 2i + 1) of every head; row 0 is at position 1."""
        dim, length = self.config.head_dim, x.shape[2]
        inverse = self.config.rope.theta ** (-np.arange(0, dim, 2) / dim)
        angles = np.outer(np.arange(1, length + 1), inverse).astype(np.float32)
        cos, sin = paddle.to_tensor(np.cos(angles)), paddle.to_tensor(np.sin(angles))
        even, odd = x[..., 0::2], x[..., 1::2]
        return paddle.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)


def draw(shape: Sequence[int]) -> Tensor:
    """Return a random weight [out, in] whose outputs are as large as its inputs."""
    return paddle.randn(list(shape)) * shape[1] ** -0.5


def train(layers: Sequence[DefinedLayer], tokens: Tensor, states: Tensor, num_steps: int) -> None:
    """Train layers to make two drafts; a single layer makes both.

    Args:
        tokens: [B, T + 1] int64.
        states: [B, T + 1, hidden], the target's that the layers read.
    """
    weights = [weight for layer in layers for weight in layer.trained_weights()]
    for weight in weights:
        weight.stop_gradient = False
    adam = paddle.optimizer.Adam(learning_rate=2e-3, parameters=weights)
    for _ in range(num_steps):
        first = layers[0].states(tokens[:, 1:-1], states[:, :-2])
        second = layers[-1].states(tokens[:, 2:-1], first[:, :-1])
        loss = F.cross_entropy(layers[0].logits(first), tokens[:, 2:])
        loss = loss + F.cross_entropy(layers[-1].logits(second), tokens[:, 3:])
        loss.backward()
        adam.step()
        adam.clear_grad()
    for weight in weights:
        weight.stop_gradient = True


def defined_drafts(layers: list[DefinedLayer], text: list[int], states: Tensor) -> Iterator[int]:
    """Yield the drafts after `text` by the definition of the layers: no cache, each from the whole sequence.

    Args:
        states: [len(text) - 1, hidden], the target's.
    """
    drafts: list[int] = []
    for draft_pass in count():
        layer = layers[min(draft_pass, len(layers) - 1)]
        if draft_pass < len(layers):
            inputs, first = states, draft_pass + 1
        else:
            inputs = paddle.concat([inputs, states[-1:]])
        states = layer.states(paddle.to_tensor([[*text, *drafts][first:]]), inputs[None])[0]
        drafts.append(int(layer.logits(states[-1:][None]).argmax()))
        yield drafts[-1]


def replayed_counts(
    layer: DefinedLayer, texts: list[list[int]], states: Tensor, num_prompt_tokens: int, num_drafts: int
) -> Counts:
    """Return the counts of engine steps over texts of one length whose drafts the definition makes.

    Args:
        states: [len(texts), T, hidden], the target's that the layer reads.
        num_prompt_tokens: of each text.
    """

    def drafts_after(index: int, end: int) -> Iterator[int]:
        return defined_drafts([layer], texts[index][:end], states[index][: end - 1])

    return replay(texts, num_prompt_tokens, num_drafts, drafts_after)


def replay(
    texts: list[list[int]], num_prompt_tokens: int, num_drafts: int, drafts_after: Callable[[int, int], Iterable[int]]
) -> Counts:
    """Return the counts of engine steps over texts, of which the first output token has no draft.

    Args:
        num_prompt_tokens: of each text.
        drafts_after: returns the drafts after the first `end` tokens of the text of this index.
    """
    counts = np.zeros((2, num_drafts), np.int64)
    for index, text in enumerate(texts):
        end = num_prompt_tokens + 1
        while end < len(text):
            room = min(num_drafts, len(text) - end - 1)
            pairs = zip(text[end : end + room], drafts_after(index, end))
            num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            counts[0, :room] += 1
            counts[1, :num_accepted] += 1
            end += num_accepted + 1
    return counts


def target_tensors(max_exponent: int = 4) -> Tensors:
    """Return the demonstration model's tensors, with a final norm whose weights differ by powers of two.

    The demonstration model's own are nearly equal, so that a state before the norm leads a layer to the same drafts as
    the state after it. The head, whose columns are divided by the same powers, gives the same logits as before.

    Args:
        max_exponent: of the powers of two.
    """
    tensors = {name: value for name, value in load_file(DEMO / "model.safetensors").items() if ".mtp_" not in name}
    norm, head = tensors["model.norm.weight"], tensors["model.embed_tokens.weight"]
    scales, inverse = (
        paddle.to_tensor(
            2.0 ** (sign * np.random.default_rng(9).integers(-max_exponent, max_exponent + 1, norm.shape))
        ).astype(norm.dtype)
        for sign in (1, -1)
    )
    return tensors | {"model.norm.weight": norm * scales, "lm_head.weight": head * inverse}


def write_checkpoint(folder: Path, layers: Tensors, target: Tensors | None = None) -> None:
    """Write a target, by default that of `target_tensors`, with layers for multi-token prediction."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    save_file((target_tensors() if target is None else target) | layers, folder / "model.safetensors", {"format": "pt"})


def engine_of(
    model: str, form: str | None, num_steps: int = 2, chunk: int = 256, num_blocks: int | None = None
) -> Engine:
    """Return an engine of a model in the demonstration model's shape, in float32; it drafts if there is a form."""
    hidden_state = "raw" if form == "ernie_raw" else "normed"
    speculative = (
        MTPConfig(num_speculative_tokens=num_steps, adaptive=False, mtp_hidden_state=hidden_state)
        if form
        else NaiveConfig()
    )
    return make_engine(
        EngineConfig(
            model=model,
            dtype="float32",
            max_model_len=128,
            cache=CacheConfig(block_size=16, num_blocks=num_blocks),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, long_prefill_token_threshold=chunk),
            speculative=speculative,
        )
    )


def texts_of(requests: list[GenerationRequest]) -> list[list[int]]:
    """Return the prompts with the outputs of the demonstration model, truncated to one length."""
    outputs = run_all(engine_of("demo", None), requests)
    texts = [[*r.prompt_token_ids, *outputs[r.request_id, 0].token_ids] for r in requests]
    return [text[: min(map(len, texts))] for text in texts]


def states_of(folder: Path, texts: list[list[int]], hidden_state: str = "normed") -> Tensor:
    """Return the states [B, T, hidden] of a model in the demonstration model's shape, of texts of one length.

    Args:
        hidden_state: `normed` for states after its final norm, `raw` for those before it.
    """
    config, length = ModelConfig.from_pretrained(str(folder), dtype="float32"), len(texts[0])
    model = load_model(config, max_rows=length, max_model_len=length)
    batch, tokens = BatchIndex(length, 1, 8, 16), HostBuffer(length, "int32")
    caches = [allocate_cache(8, 16, config.cache_spec) for _ in range(config.num_layers)]
    states: Tensor = paddle.zeros([8 * 16, config.hidden_size])
    model.store_hidden_states(states, hidden_state == "normed")
    rows, zero = np.array([length], np.int32), np.zeros(1, np.int32)
    found = []
    for text in texts:
        tokens.array[:] = text
        metadata = batch.fill(rows, zero, zero, [list(range(8))])
        model.forward(tokens.tensor, metadata, caches)
        found.append(states[:length].clone())
    return paddle.stack(found)
