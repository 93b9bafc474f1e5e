# SPDX-License-Identifier: Apache-2.0
"""What config.json says about a checkpoint quantized with compressed-tensors: a scheme for each module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastdeploy.config.checkpoint_json import check_values
from fastdeploy.config.flag import Flag, integer, switch, text
from fastdeploy.core.errors import ConfigError

FIELD = "quantization_config"
METHOD = "compressed-tensors"
PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
_MIXED, _NAIVE = "mixed-precision", "naive-quantized"  # the schemes, or the tensors, tell the format
_FORMATS = (PACKED, INTEGERS, FLOATS, _NAIVE, _MIXED)
_EXPRESSION = "re:"
_INTEGER_BITS = (4, 8)
_INTEGER_STRATEGIES = ("tensor", "channel", "group")
_FLOAT_STRATEGIES = ("channel", "block")
_BLOCK = (128, 128)  # rows and inputs that share a scale
_INSTEAD = "expected plain weights, which --quantization packs into fewer bits"
_STRINGS = Flag(
    "json", "a list of strings", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value)
)
_OBJECT = Flag("json", "an object", lambda value: isinstance(value, Mapping))
_SIZES = Flag(
    "json", "a list of two sizes", lambda value: isinstance(value, list) and [type(item) for item in value] == [int] * 2
)
_CONFIG_KEYS = {
    **dict.fromkeys(("config_groups", "sparsity_config", "transform_config", "kv_cache_scheme"), _OBJECT),
    "format": text(),
    "ignore": _STRINGS,
}
_GROUP_KEYS = {
    "targets": _STRINGS,
    **dict.fromkeys(("weights", "input_activations", "output_activations"), _OBJECT),
    "format": text(),
}
_CODE_KEYS = {
    "num_bits": integer(1, 32),
    "type": text(),
    "symmetric": switch(),
    "strategy": text(),
    "group_size": integer(-1, 2**31 - 1),
    "block_structure": _SIZES,
}


@dataclass(frozen=True)
class WeightScheme:
    """How the weights of some modules are quantized.

    Attributes:
        targets: names of modules or of their classes, and regular expressions after `re:`.
        format: PACKED, INTEGERS or FLOATS; empty if the tensors tell.
        num_bits: of a code.
        is_float: whether codes are floating-point numbers.
        is_symmetric: whether there are no zero points.
        strategy: what shares a scale: tensor, channel, group or block.
        group_size: inputs of a group; 0 for other strategies.
        block: rows and inputs of a block, for that strategy.
        row_bits: of the inputs that the checkpoint is meant for: 8, or 16 if only weights are quantized.
    """

    targets: tuple[str, ...]
    format: str
    num_bits: int
    is_float: bool
    is_symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int]
    row_bits: int


class _Targets:
    """Names and classes of modules, and regular expressions after `re:`, as the library matches them."""

    def __init__(self, targets: Iterable[str]) -> None:
        self._names = set(targets)
        expressions = [target for target in sorted(self._names) if target.startswith(_EXPRESSION)]
        self._expressions = {target: re.compile(target.removeprefix(_EXPRESSION)) for target in expressions}

    def find(self, module: str) -> str | None:
        """Return what a module fits: its name comes first, then expressions in alphabetical order, then its class.

        A bare decoder's file names modules without `model.`.
        """
        names = module, module.removeprefix("model.")
        found = next((name for name in names if name in self._names), None)
        if found is not None:
            return found
        for target, expression in self._expressions.items():
            if any(expression.match(name) for name in names):
                return target
        kind = "Embedding" if module.rpartition(".")[2].startswith("embed") else "Linear"
        return kind if kind in self._names else None


@dataclass(frozen=True)
class CompressedTensorsConfig:
    """The schemes of a checkpoint.

    Attributes:
        schemes: for the weights of some modules.
        ignore: modules that no scheme is for, as targets.
        notes: lines about what is not used.
    """

    schemes: tuple[WeightScheme, ...]
    ignore: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def has_integers(self) -> bool:
        """Return whether the codes of any module are integers."""
        return any(not scheme.is_float for scheme in self.schemes)

    def ignores(self, module: str) -> bool:
        """Return whether config.json says that a module is not quantized."""
        return self._ignored.find(module) is not None

    def scheme_of(self, module: str) -> WeightScheme | None:
        """Return the scheme of a module."""
        found = self._targets.find(module)
        return None if found is None else self._by_target[found]

    @cached_property
    def _ignored(self) -> _Targets:
        return _Targets(self.ignore)

    @cached_property
    def _by_target(self) -> dict[str, WeightScheme]:
        return {target: scheme for scheme in self.schemes for target in scheme.targets}

    @cached_property
    def _targets(self) -> _Targets:
        return _Targets(self._by_target)


def parse_compressed_tensors(raw: Mapping[str, Any], where: str) -> CompressedTensorsConfig:
    """Check the `quantization_config` of a checkpoint.

    Args:
        raw: the object.
        where: the file, as messages begin with it.

    Raises:
        ConfigError: a value is not valid, or a format is not supported.
    """
    check_values(raw, _CONFIG_KEYS, where, FIELD)
    _refuse_formats(raw, where)
    groups = raw.get("config_groups") or {}
    if not groups:
        raise _unsupported(where, "config_groups: expected a scheme for some modules, got none")
    schemes, notes = list[WeightScheme](), list[str]()
    for name, group in groups.items():
        place = f"{FIELD}.config_groups.{name:.60}"
        if not _OBJECT.is_valid(group):
            raise _unsupported(where, f"config_groups.{name:.60}: expected an object, got {group!r:.120}")
        check_values(group, _GROUP_KEYS, where, place)
        notes += _notes_of(group, f"{where}{place}")
        if group.get("weights") is not None:
            schemes.append(_scheme(group, str(raw.get("format") or ""), where, place))
    if raw.get("kv_cache_scheme"):
        notes.append(
            f"{where}{FIELD}.kv_cache_scheme has no effect: --kv-cache-dtype says how keys and values are stored"
        )
    ignore = tuple(raw.get("ignore") or ())
    _check_expressions([*ignore, *(target for scheme in schemes for target in scheme.targets)], where)
    return CompressedTensorsConfig(tuple(schemes), ignore, tuple(notes))


def _refuse_formats(raw: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for formats of a whole checkpoint that are not supported."""
    groups = [group for group in (raw.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    for format in (str(part.get("format") or "") for part in (raw, *groups)):
        if format not in ("", *_FORMATS):
            raise _unsupported(where, f"{METHOD} of format {format!r:.60} is not supported; {_INSTEAD}")
    sparse = (raw.get("sparsity_config") or {}).get("format") or "dense"
    if sparse != "dense":
        raise _unsupported(where, f"{METHOD} with sparse weights ({sparse!r:.60}) is not supported; {_INSTEAD}")
    if raw.get("transform_config"):
        raise _unsupported(where, f"{METHOD} with transforms (transform_config) is not supported; {_INSTEAD}")


def _unsupported(where: str, problem: str) -> ConfigError:
    return ConfigError(FIELD, f"{where}{problem}")


def _notes_of(group: Mapping[str, Any], place: str) -> Iterator[str]:
    """Yield lines about what a group says that is not used."""
    if group.get("weights") is None:
        yield f"{place} has no effect: it quantizes no weights"
    if group.get("output_activations") is not None:
        yield f"{place}: output_activations has no effect: outputs are not quantized"


def _scheme(group: Mapping[str, Any], format: str, where: str, place: str) -> WeightScheme:
    weights = group["weights"]
    check_values(weights, _CODE_KEYS, where, f"{place}.weights")
    own = str(group.get("format") or format)
    is_float = str(weights.get("type") or "int").lower() == "float"
    num_bits, strategy = _or(weights.get("num_bits"), 8), _strategy(weights)
    block = tuple(weights.get("block_structure") or (0, 0))
    _refuse_codes(is_float, num_bits, strategy, where, place)
    group_size = _or(weights.get("group_size"), 0) if strategy == "group" else 0
    if strategy == "group" and group_size < 1:
        raise _unsupported(where, f"{place}.weights: strategy 'group' needs the size of a group")
    if strategy == "block" and block != _BLOCK:
        raise _unsupported(where, f"{place}.weights: blocks of {list(block)} are not supported, only {list(_BLOCK)}")
    return WeightScheme(
        targets=tuple(group.get("targets") or ()),
        format="" if own in (_MIXED, _NAIVE) else own,
        num_bits=num_bits,
        is_float=is_float,
        is_symmetric=weights.get("symmetric") is not False,
        strategy=strategy,
        group_size=group_size,
        block=block,
        row_bits=_row_bits(group.get("input_activations"), where, place),
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _strategy(weights: Mapping[str, Any]) -> str:
    """Return the strategy, which follows from the size of groups if it is not given."""
    if weights.get("strategy"):
        return str(weights["strategy"]).lower()
    size = weights.get("group_size")
    return "tensor" if size is None else "group" if size > 0 else "channel"


def _refuse_codes(is_float: bool, num_bits: int, strategy: str, where: str, place: str) -> None:
    kind = f"{'floating-point numbers' if is_float else 'integers'} of {num_bits} bits"
    if num_bits not in ((8,) if is_float else _INTEGER_BITS):
        raise _unsupported(where, f"{place}.weights: {kind} are not supported (supported: integers of 4 and 8, FP8)")
    supported = _FLOAT_STRATEGIES if is_float else _INTEGER_STRATEGIES
    if strategy not in supported:
        expected = ", ".join(supported)
        raise _unsupported(
            where,
            f"{place}.weights: {kind} with a scale per {strategy!r:.40} are not supported (supported: {expected})",
        )


def _row_bits(inputs: Mapping[str, Any] | None, where: str, place: str) -> int:
    if inputs is None:
        return 16
    check_values(inputs, _CODE_KEYS, where, f"{place}.input_activations")
    return 8 if _or(inputs.get("num_bits"), 8) <= 8 else 16


def _check_expressions(targets: list[str], where: str) -> None:
    for target in targets:
        try:
            re.compile(target.removeprefix(_EXPRESSION) if target.startswith(_EXPRESSION) else "")
        except (re.error, OverflowError, RecursionError) as error:
            raise _unsupported(where, f"{target!r:.120} is no regular expression: {error!s:.120}") from None
