# SPDX-License-Identifier: Apache-2.0
"""Description of a checkpoint, from a directory in Hugging Face layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fastdeploy.config.attention_sizes import parse_attention
from fastdeploy.config.cache_spec import CacheSpec
from fastdeploy.config.checkpoint_json import GENERATION_KEYS, MODEL_KEYS, check_values, read_json_object
from fastdeploy.config.context_limit import ContextLength, ContextLimit
from fastdeploy.config.experts_config import ExpertsConfig, parse_experts
from fastdeploy.config.family_defaults import TRANSFORMERS, FamilyDefaults, find_defaults, find_sliding_window
from fastdeploy.config.foreign_formats import (
    describe_foreign_architecture,
    describe_foreign_variant,
    quantization_method,
    read_quantization,
    refuse_foreign_folder,
    refuse_unsupported_features,
    with_quantization_file,
)
from fastdeploy.config.generation_defaults import GenerationDefaults, parse_generation_defaults
from fastdeploy.config.latent_config import LatentConfig
from fastdeploy.config.overrides import NO_OVERRIDES, CheckpointOverrides
from fastdeploy.config.packed_checkpoint import AGAIN, HEADER_FILE, PackedHeader, read_packed_header
from fastdeploy.config.quantization import GGUF, UNQUANTIZED, QuantizationConfig
from fastdeploy.config.rope_config import RopeConfig
from fastdeploy.config.run_dtype import DTYPE_BYTES, DType, choose_dtype
from fastdeploy.config.unused_keys import unused_keys
from fastdeploy.config.weight_files import find_linked_gguf
from fastdeploy.core.errors import ConfigError

if TYPE_CHECKING:
    from fastdeploy.config.stored_weights import StoredWeights

KV_CACHE_DTYPES = ("auto", "int8")
_DEMO_MODEL = Path(__file__).resolve().parent.parent / "assets" / "demo_model"
_DEMO_PARTS = ("", "draft", "moe", "eagle", "eagle3", "mlp", "medusa")
_SHORT_NAMES = {f"demo/{part}".strip("/"): _DEMO_MODEL / part for part in _DEMO_PARTS}
_LAYOUT_MARKS = ("paddlenlp_version", "transformers_version", "torch_dtype")  # PaddleNLP keeps the keys of others
_ARCHITECTURE_ALIASES = {"Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM"}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, as its checkpoint describes it.

    Attributes:
        path: directory of the checkpoint.
        architecture: `architectures[0]` of config.json, one of `family_defaults.TRANSFORMERS`.
        vocab_size: rows of the embedding and of the head; the tokenizer may have fewer tokens.
        num_kv_heads: key heads; 1 with latent attention.
        head_dim: size of an attention head, where heads * head_dim may differ from hidden_size; with latent attention,
            that of a row of the cache.
        attention_bias, mlp_bias, use_bias, use_qk_norm: keys of config.json; each architecture reads some of them.
        experts: the experts of its sparse layers; None if all layers are dense.
        latent: its latent attention; None if its layers have keys and values of their own.
        sliding_window: window in tokens if any layer slides, else None.
        dtype: type of weights and activations in this run.
        eos_token_ids: end tokens that config.json names; they may be beyond the vocabulary.
        generation_eos_token_ids: the same for generation_config.json.
        layout_mark: key of config.json that tells the layout of the weights: paddlenlp_version, or transformers_version
            or torch_dtype for torch layout.
        has_int8_cache: keys and values are cached in int8 in this run.
        quantization: weight formats that config.json asks for, or to which the weights are packed.
        quantization_method: how config.json says that weights are stored as codes, one of OWN_FORMATS; else empty.
        own_codes: the same, but empty if all codes are widened.
        gguf: the GGUF file from which the directory was made, as messages name the model; else empty.
        packed: the header of packed weights, or None if the weights are plain tensors.
        notes: lines to show at start-up about keys and tensors that have no effect.
    """

    path: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    use_bias: bool
    use_qk_norm: bool
    rope: RopeConfig
    experts: ExpertsConfig | None
    sliding_window: int | None
    dtype: DType
    eos_token_ids: tuple[int, ...]
    generation_eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults
    latent: LatentConfig | None = field(default=None, repr=False)
    layout_mark: str | None = field(default=None, compare=False, repr=False)
    has_int8_cache: bool = field(default=False, repr=False)  # repr names the checkpoint
    quantization: QuantizationConfig = field(default=UNQUANTIZED, repr=False)
    quantization_method: str = field(default="", repr=False)
    own_codes: str = field(default="", repr=False)
    gguf: str = field(default="", repr=False, compare=False)
    packed: PackedHeader | None = field(default=None, repr=False, compare=False)
    notes: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def name(self) -> str:
        """Return the path of the model, as messages name it."""
        return self.gguf or self.path

    @property
    def kv_cache_dtype(self) -> str:
        """Return the type of cached keys and values: int8, or that of the activations."""
        return "int8" if self.has_int8_cache else self.dtype

    @property
    def cache_spec(self) -> CacheSpec:
        """Return what the cache of each layer holds per token."""
        spec = CacheSpec("grouped", self.num_kv_heads, self.head_dim, self.kv_cache_dtype)
        return spec if self.latent is None else replace(spec, kind="latent", rope_dim=self.latent.rope_dim)

    @property
    def has_experts(self) -> bool:
        """Return whether a router chooses from experts in any layer."""
        return self.experts is not None

    @property
    def has_codes(self) -> bool:
        """Return whether weights are stored as codes in the files that are read."""
        return bool(self.quantization_method) and self.packed is None

    def weight_formats(self, requested: QuantizationConfig) -> QuantizationConfig:
        """Return the weight format of each part: what is requested, else what config.json asks for.

        Codes that nobody asked for are widened in a run with dtype float32.

        Raises:
            ConfigError: there is a format for experts, but the model has none; the weights are packed to others; or
                they are no codes.
        """
        requested = self.checked_formats(requested)
        is_widened = self.own_codes and self.packed is None and self.dtype == "float32"
        formats = requested if requested.is_given else UNQUANTIZED if is_widened else self.quantization
        formats = formats.for_model(self.has_experts)
        if self.packed is not None and formats != self.packed.quantization:
            raise ConfigError("quantization", f"{self.name} is packed to {self.packed.quantization}, got {formats}")
        return formats

    def checked_formats(self, requested: QuantizationConfig) -> QuantizationConfig:
        """Return `requested.for_codes` of this checkpoint."""
        return requested.for_codes(self.quantization_method, are_widened=not self.own_codes, name=self.name)

    @property
    def max_context_len(self) -> int:
        """Return the longest context that the checkpoint is meant for, in tokens."""
        return self.rope.max_context_len

    @property
    def state_bytes(self) -> int:
        """Return the bytes of one hidden state."""
        return self.hidden_size * DTYPE_BYTES[self.dtype]

    def choose_max_model_len(self, requested: ContextLength) -> int:
        """Return the maximum number of tokens of prompt and output, for a value of `--max-model-len`.

        Raises:
            ConfigError: it is more than the checkpoint supports; names both numbers.
        """
        if requested == "auto":
            return self.default_context.num_tokens
        if requested > (limit := self.max_context_len):
            raise ConfigError("max_model_len", f"{requested} is more than the model's limit of {limit} tokens")
        self.check_max_model_len(requested)
        return requested

    @property
    def default_context(self) -> ContextLimit:
        """Return the longest context with which every text is computed as in a shorter one."""
        limits = [ContextLimit(self.max_context_len)]
        if self.rope.kind == "dynamic":
            reason = "with more, RoPE type dynamic computes short texts in another way"
            limits.append(ContextLimit(self.rope.max_position_embeddings, reason))
        if self.sliding_window is not None:
            limits.append(ContextLimit(self.sliding_window, "the sliding window"))
        return min(limits)

    def check_max_model_len(self, max_model_len: int) -> None:
        """Refuse a context that is longer than the sliding window, which is not supported.

        Raises:
            ConfigError: names the window.
        """
        if self.sliding_window is not None and max_model_len > self.sliding_window:
            raise ConfigError(
                "sliding_window",
                f"sliding-window attention is not supported; its window of {self.sliding_window} tokens has no effect "
                f"with --max-model-len {self.sliding_window} or less, got {max_model_len}",
            )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str = "auto",
        generation_config: str = "auto",
        kv_cache_dtype: str = "auto",
        reads_weights: bool = True,
        overrides: CheckpointOverrides = NO_OVERRIDES,
    ) -> ModelConfig:
        """Read config.json and generation_config.json of a checkpoint directory.

        Args:
            path: directory that holds config.json.
            dtype: `auto` (the checkpoint's; float16 runs as bfloat16, float64 as float32), `bfloat16` or `float32`.
            generation_config: `auto` reads generation_config.json, `none` ignores it.
            kv_cache_dtype: `auto` (the run's dtype) or `int8`, which needs dtype bfloat16.
            reads_weights: whether the files of weights are looked at, which tell the dtype if config.json does not, and
                whether a tied head has values of its own; it takes NumPy.
            overrides: values that replace those of the two files.

        Raises:
            ConfigError: a file is missing or unreadable, or an architecture or feature is not supported.
        """
        directory = Path(path)
        refuse_foreign_folder(directory)
        written = read_json_object(directory / "config.json", "model")
        if written is None:
            raise ConfigError("model", f"{directory} has no config.json")
        raw = overrides.apply_to_config(with_quantization_file(written, directory))
        is_read = generation_config == "auto"
        proposed = read_json_object(directory / "generation_config.json", "model") if is_read else None
        generation = overrides.apply_to_generation(proposed or {})
        packed = read_packed_header(directory)
        parse = partial(parse_model_config, raw, generation, path=str(directory), overrides=overrides)
        if packed is not None:
            config = _with_packed(parse(dtype=packed.dtype), packed, dtype)
        elif reads_weights:
            from fastdeploy.config.stored_weights import StoredWeights

            weights = StoredWeights(directory)
            config = _with_weights(parse(dtype=dtype, stored=weights.dtype), weights)
        else:
            config = parse(dtype=dtype)
        if kv_cache_dtype == "int8" and config.dtype != "bfloat16":
            raise ConfigError("kv_cache_dtype", f"int8 needs dtype bfloat16, got {config.dtype}")
        if kv_cache_dtype == "int8" and config.latent is not None:
            problem = f"int8 is not supported yet with the latent attention of {config.architecture}; leave it at auto"
            raise ConfigError("kv_cache_dtype", problem)
        gguf = str(find_linked_gguf(directory) or "")
        if config.own_codes == GGUF and packed is None and not gguf:
            problem = "checkpoints quantized with 'gguf' are read from the GGUF file itself"
            raise ConfigError("quantization_config", f"{directory}/config.json: {problem}")
        return replace(config, has_int8_cache=kv_cache_dtype == "int8", gguf=gguf)


def parse_model_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any],
    *,
    path: str = "",
    dtype: str = "auto",
    stored: str = "float32",
    overrides: CheckpointOverrides = NO_OVERRIDES,
) -> ModelConfig:
    """Make a ModelConfig from the contents of config.json and generation_config.json.

    Args:
        path: directory of the files.
        dtype: as `from_pretrained` takes it.
        stored: dtype of the weights in their files, which counts if config.json names none.
        overrides: what has been replaced in the two files.

    Raises:
        ConfigError: an architecture or feature is not supported, or a value is missing or not valid.
    """
    with overrides.errors_name_the_flag(), _errors_name_the_folder(path):
        return _parse(raw, generation, path, dtype, stored)


@contextmanager
def _errors_name_the_folder(path: str) -> Iterator[None]:
    """Make errors about config.json that do not name its folder name the file."""
    try:
        yield
    except ConfigError as error:
        if path in error.message:
            raise
        raise ConfigError(error.field, f"{path}/config.json: {error.message}") from None


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any], path: str, dtype: str, stored: str) -> ModelConfig:
    where = f"{path}/config.json: " if path else ""
    architecture, quantization = _architecture(raw, where), read_quantization(raw, where)
    check_values(raw, MODEL_KEYS, where)
    check_values(generation, GENERATION_KEYS, where.replace("config.json", "generation_config.json"))
    refuse_unsupported_features(raw)
    defaults = find_defaults(raw, architecture)

    def count(key: str, derived: int | None = None) -> int:
        return _count(raw, key, where, defaults, derived)

    attention, num_layers = parse_attention(raw, architecture, count, where), count("num_hidden_layers")
    return ModelConfig(
        path=path,
        architecture=architecture,
        hidden_size=count("hidden_size"),
        intermediate_size=count("intermediate_size"),
        num_layers=num_layers,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        vocab_size=count("vocab_size"),
        max_position_embeddings=count("max_position_embeddings"),
        rms_norm_eps=float(defaults.value(raw, "rms_norm_eps")),
        tie_word_embeddings=bool(defaults.value(raw, "tie_word_embeddings")),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        use_bias=bool(raw.get("use_bias", False)),
        use_qk_norm=bool(raw.get("use_qk_norm", False)),
        rope=attention.rope,
        experts=parse_experts(raw, architecture, num_layers, where),
        latent=attention.latent,
        sliding_window=find_sliding_window(raw, num_layers, defaults),
        dtype=choose_dtype(dtype, raw, stored),
        eos_token_ids=_eos_token_ids(raw),
        generation_eos_token_ids=_eos_token_ids(generation),
        generation=parse_generation_defaults(generation, where.replace("config.json", "generation_config.json")),
        layout_mark=next((key for key in _LAYOUT_MARKS if raw.get(key) is not None), None),
        quantization=quantization,
        quantization_method=quantization_method(raw),
        own_codes=quantization.name if quantization.has_own_codes else "",
        notes=tuple(unused_keys(raw, architecture, attention.rope.theta, where)),
    )


def _with_packed(config: ModelConfig, packed: PackedHeader, dtype: str) -> ModelConfig:
    """Return the configuration of packed weights, whose head may be another one than config.json says."""
    if dtype not in ("auto", packed.dtype):
        raise ConfigError("dtype", f"{config.name} is packed for dtype {packed.dtype}, got {dtype}")
    try:
        packed.quantization.for_model(config.has_experts)
    except ConfigError as error:
        raise ConfigError("model", f"{config.name}/{HEADER_FILE}: {error}; {AGAIN}") from None
    is_tied = config.tie_word_embeddings and "lm_head" not in packed.entries
    return replace(config, packed=packed, quantization=packed.quantization, tie_word_embeddings=is_tied)


def _with_weights(config: ModelConfig, weights: StoredWeights) -> ModelConfig:
    """Return a configuration that the files agree with: without a tied head if they have another one."""
    head = weights.find_own_head() if config.tie_word_embeddings else None
    notes = [*config.notes, *weights.notes(config.num_layers)]
    if head is not None:
        what = "is used, since it differs from the embedding, to which config.json ties it"
        notes.append(f"{head.file}: lm_head.weight {what}")
    return replace(config, tie_word_embeddings=config.tie_word_embeddings and head is None, notes=tuple(notes))


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    name = _ARCHITECTURE_ALIASES.get(str(name), name)
    problem = describe_foreign_variant(raw, name)
    if name not in TRANSFORMERS or problem:
        supported = ", ".join(TRANSFORMERS)
        problem = problem or describe_foreign_architecture(raw, name)
        raise ConfigError("architectures", f"{where}{problem} (supported: {supported})")
    return cast(str, name)


def _count(raw: Mapping[str, Any], key: str, where: str, defaults: FamilyDefaults, derived: int | None) -> int:
    """Return a size of config.json, whose type and range are checked; 0 can only be a default.

    Args:
        derived: the size that follows from others, if neither config.json nor the family has one.
    """
    value = defaults.value(raw, key) if hasattr(defaults, key) else raw.get(key)
    count: int | None = derived if value is None else value
    if not count:
        raise ConfigError(key, f"{where}expected {MODEL_KEYS[key].expected}, got {count}")
    return count


def _eos_token_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def local_model_path(name: str) -> Path | None:
    """Return the local directory of a model, or None if there is none."""
    return path if (path := _SHORT_NAMES.get(name) or Path(name).expanduser()).is_dir() else None
