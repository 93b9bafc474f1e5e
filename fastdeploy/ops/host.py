# SPDX-License-Identifier: Apache-2.0
"""Stateful structures of the host in a Paddle-free native library; calls take batches and release the GIL."""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastdeploy.version import __version__

MAX_NGRAM = 16
MAX_TAIL = 16
_MESSAGE_BYTES = 256
_pointer, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "fd_library_version": (ctypes.c_char_p, []),
    "fd_library_hash": (ctypes.c_char_p, []),
    "fd_ngram_create": (_pointer, [_int32, _int32]),
    "fd_ngram_destroy": (None, [_pointer]),
    "fd_ngram_start": (_int64, [_pointer, _int64, _pointer, _int64]),
    "fd_ngram_finish": (_int64, [_pointer, _int64]),
    "fd_ngram_extend_batch": (_int64, [_pointer, _pointer, _pointer, _pointer, _int64]),
    "fd_ngram_propose_batch": (_int64, [*[_pointer] * 5, _int64, _int64, _pointer, _pointer, _pointer]),
    "fd_ngram_num_bytes": (_int64, [_pointer]),
    "fd_ngram_check_integrity": (None, [_pointer, ctypes.c_char_p, _int64]),
    "fd_suffix_create": (_pointer, [_int32, _int32, ctypes.c_double, ctypes.c_double, _int64, _int64]),
    "fd_suffix_destroy": (None, [_pointer]),
    "fd_suffix_start": (_int64, [_pointer, _int64, ctypes.c_char_p, _int64, _pointer, _int64]),
    "fd_suffix_extend_batch": (_int64, [_pointer, _pointer, _pointer, _pointer, _int64]),
    "fd_suffix_propose_batch": (_int64, [*[_pointer] * 5, _int64, _int64, *[_pointer] * 5]),
    "fd_suffix_finish": (_int64, [_pointer, _int64, _pointer, _int64]),
    "fd_suffix_restore": (_int64, [_pointer, ctypes.c_char_p, _int64, _pointer, _int64]),
    "fd_suffix_first_output": (_int64, [_pointer]),
    "fd_suffix_read_output": (_int64, [_pointer, _int64, _pointer, ctypes.c_char_p, _int64]),
    "fd_suffix_evict": (None, [_pointer, _int64]),
    "fd_suffix_work": (_int64, [_pointer, _int64]),
    "fd_suffix_usage": (None, [_pointer, _pointer]),
    "fd_suffix_check_integrity": (None, [_pointer, ctypes.c_char_p, _int64]),
}

IntArray = NDArray[np.int32]


class HostLibraryError(RuntimeError):
    """The host library is missing or was built for another version of the package."""


def library_path() -> Path:
    """Return where the build puts the host library of this Python."""
    return Path(__file__).parent / f"_host{sysconfig.get_config_var('EXT_SUFFIX')}"


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """Load the host library once.

    Raises:
        HostLibraryError: it is missing, cannot be loaded, or carries another version than the package.
    """
    path = library_path()
    if not path.exists():
        raise HostLibraryError(
            f"host library: expected {path.name} in {path.parent}, got none; build it with `pip install -e .` "
            "in a checkout (needs g++ and Python.h) or reinstall the package"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise HostLibraryError(f"host library: cannot load {path}: {error}; rebuild it") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            raise HostLibraryError(f"host library: {path.name}: expected a function {name}, got none; rebuild it")
        function.restype, function.argtypes = result, arguments
    version = library.fd_library_version().decode()
    if version != __version__:
        raise HostLibraryError(
            f"host library: {path.name}: expected version {__version__}, got {version}; rebuild it with "
            "`pip install -e .` or reinstall the package"
        )
    return library


def library_hash() -> str:
    """Return 16 hexadecimal digits over the sources that the host library was built from."""
    return str(load_library().fd_library_hash().decode())


class NgramIndex:
    """Finds, for live sequences of tokens, where their last few tokens occurred before.

    A sequence is known by its slot, a small number of the caller's choice. The index holds at most 36 bytes per token
    for n = 1..5 and 6.3 for each further n.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        """Create an empty index over suffixes of min_n .. max_n tokens, 1 <= min_n <= max_n <= 16."""
        if not 1 <= min_n <= max_n <= MAX_NGRAM:
            raise ValueError(f"NgramIndex: expected 1 <= min_n <= max_n <= {MAX_NGRAM}, got {min_n} and {max_n}")
        self._library = load_library()
        self._index = self._library.fd_ngram_create(min_n, max_n)

    def __del__(self) -> None:
        if getattr(self, "_index", None) is not None:
            self._library.fd_ngram_destroy(self._index)

    def start(self, slot: int, tokens: IntArray | Sequence[int]) -> None:
        """Index the tokens of a new sequence.

        Raises:
            ValueError: the slot is negative or in use.
        """
        values = _int32_array(tokens)
        if self._library.fd_ngram_start(self._index, slot, values.ctypes.data, len(values)):
            raise ValueError(f"NgramIndex.start: slot: expected one that is not in use, got {slot}")

    def extend_batch(
        self, slots: IntArray | Sequence[int], cu_tokens: IntArray | Sequence[int], tokens: IntArray | Sequence[int]
    ) -> None:
        """Append tokens[cu_tokens[i]:cu_tokens[i + 1]] to the sequence of slots[i].

        Raises:
            ValueError: a slot is not in use, or cu_tokens does not describe `tokens`.
        """
        slots, cu_tokens, tokens = _int32_array(slots), _int32_array(cu_tokens), _int32_array(tokens)
        if len(cu_tokens) != len(slots) + 1 or cu_tokens[0] < 0 or cu_tokens[-1] > len(tokens):
            raise ValueError(
                f"NgramIndex.extend_batch: cu_tokens: expected {len(slots) + 1} offsets into {len(tokens)} tokens, "
                f"got {cu_tokens.tolist()}"
            )
        wrong = self._library.fd_ngram_extend_batch(
            self._index, slots.ctypes.data, cu_tokens.ctypes.data, tokens.ctypes.data, len(slots)
        )
        if wrong:
            raise ValueError(f"NgramIndex.extend_batch: slots: expected live slots, got {slots[wrong - 1]}")

    def propose_batch(
        self,
        slots: IntArray | Sequence[int],
        caps: IntArray | Sequence[int],
        tails: Sequence[IntArray] | None = None,
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Look up the longest suffix of each sequence that occurred before; return what followed its last occurrence.

        Args:
            slots: [n] sequences; caps: [n] most tokens wanted of each, 0 and below for none.
            tails: [n] arrays of up to MAX_TAIL tokens that are taken to follow the sequences; they are not indexed.

        Returns:
            (tokens [n, max(caps)] int32, counts [n] int32, match_lens [n] int32): the first counts[i] tokens of row i
            are proposed, after a match of match_lens[i] tokens; both 0 if there is none.

        Raises:
            ValueError: a slot is not in use, or a tail is too long.
        """
        slots, caps = _int32_array(slots), _int32_array(caps)
        if len(slots) != len(caps):
            raise ValueError(f"NgramIndex.propose_batch: caps: expected {len(slots)}, got {len(caps)}")
        packed = PackedTails(tails, len(slots))
        stride = max(int(caps.max(initial=0)), 0)
        tokens = np.zeros((len(slots), stride), np.int32)
        counts, match_lens = np.zeros((2, len(slots)), np.int32)
        wrong = self._library.fd_ngram_propose_batch(
            self._index,
            slots.ctypes.data,
            caps.ctypes.data,
            *packed.addresses,
            len(slots),
            stride,
            tokens.ctypes.data,
            counts.ctypes.data,
            match_lens.ctypes.data,
        )
        if wrong:
            raise ValueError(f"NgramIndex.propose_batch: slots: expected live slots, got {slots[wrong - 1]}")
        return tokens, counts, match_lens

    def finish(self, slot: int) -> None:
        """Forget a sequence.

        Raises:
            ValueError: the slot is not in use.
        """
        if self._library.fd_ngram_finish(self._index, slot):
            raise ValueError(f"NgramIndex.finish: slot: expected a live slot, got {slot}")

    def num_bytes(self) -> int:
        """Return the memory held, in bytes."""
        return int(self._library.fd_ngram_num_bytes(self._index))

    def check_integrity(self) -> None:
        """Check that every n-gram is indexed at its last place, and nothing else is.

        Raises:
            AssertionError: with what is wrong.
        """
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._library.fd_ngram_check_integrity(self._index, message, _MESSAGE_BYTES)
        if message.value:
            raise AssertionError(f"NgramIndex: {message.value.decode()}")


class PackedTails:
    """Tails of a batch as the native calls take them; keeps the arrays alive that `addresses` refer to."""

    def __init__(self, tails: Sequence[IntArray] | None, num_rows: int) -> None:
        """Pack one tail per row; None stands for none at all.

        Raises:
            ValueError: another number of tails, or one of more than MAX_TAIL tokens.
        """
        self.addresses: tuple[int | None, int | None] = (None, None)
        if tails is None:
            return
        lengths = [len(tail) for tail in tails]
        if len(tails) != num_rows or max(lengths, default=0) > MAX_TAIL:
            raise ValueError(f"tails: expected {num_rows} of at most {MAX_TAIL} tokens, got lengths {lengths}")
        self._cu_tails = np.cumsum([0, *lengths], dtype=np.int32)
        self._tokens = np.concatenate([*tails, np.empty(0, np.int32)]).astype(np.int32)
        self.addresses = (self._cu_tails.ctypes.data, self._tokens.ctypes.data)


def _int32_array(values: IntArray | Sequence[int]) -> IntArray:
    return np.ascontiguousarray(values, dtype=np.int32)
