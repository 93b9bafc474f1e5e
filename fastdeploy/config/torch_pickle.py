# SPDX-License-Identifier: Apache-2.0
"""Reads the pickle of a PyTorch file without running anything.

A pickle is a program for a small stack machine. The one here knows the opcodes and the names that `torch.save` writes
for a dictionary of tensors. Any other opcode or name is refused, and no name is ever imported or called.
"""

from __future__ import annotations

import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from fastdeploy.core.errors import ConfigError

MAX_PICKLE_BYTES = 1 << 21  # about 8,000 tensors; what the machine holds is at most a hundred times as large
MAX_DIMENSIONS = 8
_MAX_SIZE = 1 << 48  # elements of a storage
_MAX_KEY = 20  # characters; torch.save counts storages
_MAX_SHOWN = 120
_PROTOCOLS = (2, 3, 4, 5)
_ORDERED_DICT = "collections OrderedDict"
_REBUILD_TENSOR = "torch._utils _rebuild_tensor_v2"
_REBUILD_PARAMETER = "torch._utils _rebuild_parameter"
STORAGES = {
    "torch BFloat16Storage": "BF16",
    "torch HalfStorage": "F16",
    "torch FloatStorage": "F32",
    "torch DoubleStorage": "F64",
    "torch LongStorage": "I64",
    "torch IntStorage": "I32",
    "torch ByteStorage": "U8",
    "torch BoolStorage": "BOOL",
}
"""Types of storages, and their dtypes as safetensors spells them."""
_NAMES = (_ORDERED_DICT, _REBUILD_TENSOR, _REBUILD_PARAMETER, *STORAGES)
_CONSTANTS: Mapping[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_OTHERS = (
    *("PROTO", "FRAME", "MARK", "STOP", "EMPTY_DICT", "TUPLE", "SETITEM", "SETITEMS", "BUILD", "REDUCE", "BINPERSID"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL"),
)
_OPCODES = {*_CONSTANTS, *_VALUES, *_TUPLES, *_OTHERS}
_BY_CODE = {opcode.code: opcode for opcode in pickletools.opcodes}
_MARK = object()


@dataclass(frozen=True)
class Storage:
    """A storage: `num_elements` numbers in the file's member `data/KEY`."""

    dtype: str
    key: str
    num_elements: int


@dataclass(frozen=True)
class View:
    """A tensor: elements of a storage from `offset` on; `strides` are counted in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """Return the number of elements from the first to the last one."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def overlaps_itself(self) -> bool:
        """Return whether two indices may mean the same element, as in what `expand` returns."""
        if 0 in self.shape:
            return False
        reached = 0  # the largest distance that the smaller strides reach
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride <= reached:
                return True
            reached += (size - 1) * stride
        return False


@dataclass(frozen=True)
class _Name:
    """One of `_NAMES`, which stands for what it names."""

    name: str


def read_pickle(data: bytes, where: str) -> dict[str, View]:
    """Return the tensors of a dictionary that `torch.save` has pickled, by name.

    Args:
        where: the file, as messages begin with it.

    Raises:
        ConfigError: it contains anything else than tensors, or they are not valid.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise ConfigError("model", f"{where}: a pickle of {len(data)} bytes, expected at most {MAX_PICKLE_BYTES}")
    try:
        return _tensors(_Machine(data).run())
    except _RefusedError as error:
        raise ConfigError("model", f"{where}: {error}") from None


class _RefusedError(Exception):
    """What is wrong with a pickle."""


def _tensors(result: Any) -> dict[str, View]:
    """Return a pickle's value if it is a dictionary of tensors."""
    if not isinstance(result, dict):
        raise _RefusedError(f"holds {_kind(result)}, expected a dictionary from names to tensors")
    for name, value in result.items():
        if not name.isprintable() or not name:
            raise _RefusedError(f"the tensor's name {_shown(name)} is not printable")
        if not isinstance(value, View):
            raise _RefusedError(f"{_shown(name)} is {_kind(value)}, expected a tensor")
    return result


class _Machine:
    """The stack machine of pickles, for data only."""

    def __init__(self, data: bytes) -> None:
        self._stream = BytesIO(data)
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Return the value that the pickle describes."""
        while (opcode := self._next_opcode()).name != "STOP":
            try:
                argument = None if opcode.arg is None else opcode.arg.reader(self._stream)
            except ValueError as error:
                raise _RefusedError(f"the pickle is damaged: {opcode.name}: {error!s:.200}") from None
            try:
                self._execute(opcode.name, argument)
            except (LookupError, ValueError):
                raise _RefusedError(f"the pickle is damaged: {opcode.name} lacks what it works on") from None
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise _RefusedError("the pickle is damaged: it ends with more or less than one value")
        return self._stack[0]

    def _next_opcode(self) -> pickletools.OpcodeInfo:
        code = self._stream.read(1)
        if not code:
            raise _RefusedError("the pickle is damaged: it has no end")
        opcode = _BY_CODE.get(code.decode("latin-1"))
        if opcode is None or opcode.name not in _OPCODES:
            name = f"0x{code.hex()}" if opcode is None else opcode.name
            raise _RefusedError(f"the pickle has the opcode {name}, which no dictionary of tensors needs; {_ADVICE}")
        return opcode

    def _execute(self, name: str, argument: Any) -> None:
        """Execute an opcode, which raises LookupError or ValueError where the stack or the memo lacks something."""
        stack = self._stack
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _VALUES:
            stack.append(argument)
        elif name in _TUPLES:
            stack.append(self._pop_last(_TUPLES[name]))
        elif name == "PROTO":
            if argument not in _PROTOCOLS:
                raise _RefusedError(f"the pickle has protocol {argument}, expected one of {_PROTOCOLS}")
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "TUPLE":
            stack.append(self._pop_to_mark())
        elif name == "SETITEM":
            self._set_items(self._pop_last(2))
        elif name == "SETITEMS":
            self._set_items(self._pop_to_mark())
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._top()
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "GLOBAL":
            stack.append(_find_name(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(_find_name(*self._pop_last(2)))
        elif name == "REDUCE":
            stack.append(_reduce(*self._pop_last(2)))
        elif name == "BUILD":
            self._pop_last(1)  # the state of an OrderedDict: versions of modules, which nothing reads
            _expect_dict(self._top())
        elif name == "BINPERSID":
            stack.append(_storage(*self._pop_last(1)))

    def _top(self) -> Any:
        """Return the last value."""
        if self._stack[-1] is _MARK:
            raise IndexError
        return self._stack[-1]

    def _pop_last(self, count: int) -> tuple[Any, ...]:
        """Remove the last values and return them."""
        values = tuple(self._stack[-count:])
        if len(values) < count or _MARK in values:
            raise IndexError
        del self._stack[-count:]
        return values

    def _pop_to_mark(self) -> tuple[Any, ...]:
        """Remove the values after the last mark, and the mark, and return the values."""
        values = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return tuple(reversed(values))

    def _set_items(self, items: tuple[Any, ...]) -> None:
        """Set items, which are keys and values in turn, in the dictionary on the stack."""
        target = _expect_dict(self._top())
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise _RefusedError(f"a dictionary has {_kind(key)} as a key, expected a name")
            target[key] = value


_ADVICE = "nothing was run; convert the weights to safetensors on a computer where you trust the file"


def _find_name(module: Any, name: Any) -> _Name:
    """Return a name, if it is one that is known."""
    if not isinstance(module, str) or not isinstance(name, str):
        raise _RefusedError("the pickle takes a name that is no text")
    if f"{module} {name}" not in _NAMES:
        raise _RefusedError(
            f"the pickle uses {_shown(f'{module}.{name}')}, which no dictionary of tensors needs; {_ADVICE}"
        )
    return _Name(f"{module} {name}")


def _reduce(function: Any, arguments: Any) -> Any:
    """Return what calling a name with these arguments means."""
    match function, arguments:
        case _Name(name=name), () if name == _ORDERED_DICT:
            return {}
        case _Name(name=name), (View() as tensor, bool(), dict()) if name == _REBUILD_PARAMETER:
            return tensor
        case (
            _Name(name=name),
            (Storage() as storage, offset, tuple() as shape, tuple() as strides, bool(), dict(), *metadata),
        ) if name == _REBUILD_TENSOR and metadata in ([], [None]):
            return _view(storage, offset, shape, strides)
    called = function.name.split()[1] if isinstance(function, _Name) else _kind(function)
    raise _RefusedError(f"the pickle calls {called} with other arguments than torch.save writes; {_ADVICE}")


def _view(storage: Storage, offset: Any, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> View:
    """Return a tensor whose elements lie within its storage."""
    if not all(map(_is_size, (offset, *shape, *strides))) or len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
        raise _RefusedError("the pickle has a tensor with an offset, a shape or strides that are not valid")
    view = View(storage, offset, shape, strides)
    if offset + view.span > storage.num_elements:
        raise _RefusedError(
            f"a tensor of shape {shape} takes {offset + view.span} elements of a storage of {storage.num_elements}"
        )
    if view.overlaps_itself:
        raise _RefusedError(f"a tensor of shape {shape} with strides {strides} overlaps itself")
    return view


def _storage(identifier: Any) -> Storage:
    """Return the storage that a persistent id names."""
    match identifier:
        case ("storage", _Name(name=name), str(key), str(), num_elements) if name in STORAGES:
            if key.isalnum() and key.isascii() and len(key) <= _MAX_KEY and _is_size(num_elements):
                return Storage(STORAGES[name], key, num_elements)
    raise _RefusedError("the pickle has a persistent id that is not that of a storage")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_SIZE


def _expect_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _RefusedError(f"the pickle sets items or a state of {_kind(value)}, expected a dictionary")
    return value


def _kind(value: Any) -> str:
    """Return what a value is, for a message."""
    if isinstance(value, View):
        return "a tensor"
    if isinstance(value, dict):
        return "a dictionary"
    return f"a value of type {type(value).__name__.lstrip('_').lower()}"


def _shown(name: str) -> str:
    """Return a name in quotes for a message: shortened, and without characters that are not ASCII."""
    return ascii(name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}...")
