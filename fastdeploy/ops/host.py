# SPDX-License-Identifier: Apache-2.0
"""The host library: native code that needs no Paddle, such as drafting. Calls take batches and release the GIL."""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from fastdeploy.ops.missing_library import missing_library
from fastdeploy.ops.text_batch import IntArray, TextBatch
from fastdeploy.version import __version__

MAX_NGRAM = 16
MAX_MATCH_LEN = 16  # longer matches of an NgramIndex are reported as this long
_MESSAGE_BYTES = 256
_pointer, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "fd_library_version": (ctypes.c_char_p, []),
    "fd_library_hash": (ctypes.c_char_p, []),
    "fd_ngram_create": (_pointer, [_int32, _int32]),
    "fd_ngram_destroy": (None, [_pointer]),
    "fd_ngram_start": (_int64, [_pointer, _int64, _pointer, _int64]),
    "fd_ngram_finish": (_int64, [_pointer, _int64]),
    "fd_ngram_draft_batch": (_int64, [_pointer, _pointer]),
    "fd_ngram_num_bytes": (_int64, [_pointer]),
    "fd_ngram_check_integrity": (None, [_pointer, ctypes.c_char_p, _int64]),
    "fd_move_blocks": (None, [_pointer]),
    "fd_num_threads_error": (ctypes.c_char_p, []),
    "fd_ggml_split": (None, [_pointer, _pointer, _pointer, _pointer]),
    "fd_ggml_widen": (None, [_pointer, _pointer, _int64]),
    "fd_ggml_find_bad_scale": (_int64, [_pointer]),
    "fd_codes_unpack": (None, [_pointer, _int64, _int64, _int64, _int64, _int64, _pointer]),
    "fd_codes_widen": (None, [_pointer, _pointer, _int64]),
    "fd_codes_convert": (None, [_pointer, _pointer, _pointer]),
    "fd_words_unpack": (None, [_pointer, _int64, _pointer]),
    "fd_fp8_widen": (_int64, [_pointer, _pointer, _int64]),
    "fd_suffix_create": (_pointer, [_int32, _int32, ctypes.c_double, ctypes.c_double, _int64, _int64]),
    "fd_suffix_destroy": (None, [_pointer]),
    "fd_suffix_start": (_int64, [_pointer, _int64, ctypes.c_char_p, _int64, _pointer, _int64]),
    "fd_suffix_draft_batch": (_int64, [_pointer, _pointer]),
    "fd_suffix_finish": (_int64, [_pointer, _int64, _pointer, _int64]),
    "fd_suffix_process": (_int64, [_pointer, _int64]),
    "fd_suffix_usage": (None, [_pointer, _pointer]),
    "fd_suffix_check_integrity": (None, [_pointer, ctypes.c_char_p, _int64]),
}


class HostLibraryError(RuntimeError):
    """The host library is missing or was built for another version of the package."""


def library_path() -> Path:
    """Return where the build puts the host library of this Python."""
    return Path(__file__).parent / f"_host{sysconfig.get_config_var('EXT_SUFFIX')}"


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """Load the host library once.

    Raises:
        HostLibraryError: it is missing, cannot be loaded, or has another version than the package.
    """
    path = library_path()
    if not path.exists():
        raise HostLibraryError(f"host library: {missing_library(path)}")
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


@lru_cache(maxsize=1)
def load_threaded_library() -> ctypes.CDLL:
    """Load the host library for calls that use threads.

    Raises:
        HostLibraryError: the library cannot be used, or FD_NUM_THREADS is invalid.
    """
    library = load_library()
    if (reason := library.fd_num_threads_error()) is not None:
        raise HostLibraryError(reason.decode())
    return library


def library_hash() -> str:
    """Return the hash of the sources that the host library was built from, 16 hexadecimal digits."""
    return str(load_library().fd_library_hash().decode())


class NgramIndex:
    """Finds where the last tokens of live sequences occurred before.

    A sequence is identified by its slot, a small number that the caller chooses. The index takes at most 36 bytes per
    token for n = 1..5, and 6.3 for each further n.
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

    def draft_batch(self, batch: TextBatch) -> None:
        """Append tokens to the sequences and draft what followed the last occurrence of the longest matching suffix.

        Raises:
            ValueError: a slot is not in use.
        """
        wrong = self._library.fd_ngram_draft_batch(self._index, batch.address)
        if wrong:
            raise ValueError(f"NgramIndex.draft_batch: slots: expected live slots, got {batch.slot(wrong - 1)}")

    def finish(self, slot: int) -> None:
        """Remove a sequence.

        Raises:
            ValueError: the slot is not in use.
        """
        if self._library.fd_ngram_finish(self._index, slot):
            raise ValueError(f"NgramIndex.finish: slot: expected a live slot, got {slot}")

    def num_bytes(self) -> int:
        """Return the memory of the index in bytes."""
        return int(self._library.fd_ngram_num_bytes(self._index))

    def check_integrity(self) -> None:
        """Check that every n-gram is indexed at its last position, and nothing else.

        Raises:
            AssertionError: the index is inconsistent; the message says how.
        """
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._library.fd_ngram_check_integrity(self._index, message, _MESSAGE_BYTES)
        if message.value:
            raise AssertionError(f"NgramIndex: {message.value.decode()}")


def _int32_array(values: IntArray | Sequence[int]) -> IntArray:
    return np.ascontiguousarray(values, dtype=np.int32)
