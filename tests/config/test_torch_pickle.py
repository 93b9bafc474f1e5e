# SPDX-License-Identifier: Apache-2.0
"""Nothing that the pickle of a PyTorch file contains is run: it holds tensors, or is refused."""

from __future__ import annotations

import codecs
import copyreg
import io
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.torch_files import ITEM_BYTES, read_torch_file
from fastdeploy.config.torch_pickle import STORAGES
from fastdeploy.core.errors import ConfigError
from tests.config.torch_writer import (
    FALSE,
    GOLDEN,
    ORDERED_DICT,
    REBUILD_TENSOR,
    SIX,
    WEIGHT,
    dictionary,
    integer,
    integers,
    mutate,
    name,
    pickle_of,
    refusal,
    text,
    tuple_of,
    write_container,
    write_pickle,
)

EVENTS = ("exec", "compile", "import", "os.system", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")
seen: list[str] | None = None


def remember(event: str, _: tuple[Any, ...]) -> None:
    if seen is not None and event in EVENTS:
        seen.append(event)


@cache
def install_hook() -> None:
    sys.addaudithook(remember)  # for good: it cannot be taken away


@contextmanager
def running_nothing() -> Iterator[None]:
    """Fail if the block imports, compiles or runs anything."""
    global seen
    codecs.lookup("cp437")  # which zipfile imports when it first reads a name
    install_hook()
    seen = []
    try:
        yield
        assert seen == []
    finally:
        seen = None


class Runs:
    """What `pickle` turns into a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> Any:
        return self.called


CALLS: dict[str, Callable[[Path], Any]] = {
    "system": lambda marker: Runs(os.system, f"touch {marker}"),
    "eval": lambda marker: Runs(eval, f"open({str(marker)!r}, 'w').close()"),
    "exec": lambda marker: Runs(exec, f"open({str(marker)!r}, 'w').close()"),
    "call": lambda marker: Runs(subprocess.call, ["touch", str(marker)]),
    "mkdir": lambda marker: Runs(os.mkdir, str(marker)),
    "open": lambda marker: Runs(open, str(marker), "w"),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("place", ["value", "key", "state", "within a list", "argument", "hooks"])
@pytest.mark.parametrize("call", ["system", "eval", "exec", "call", "mkdir", "open"])
def test_a_call_is_refused_by_its_name_and_not_made(tmp_path: Path, call: str, place: str, protocol: int) -> None:
    marker = tmp_path / "marker"
    function = CALLS[call](marker)
    state = OrderedDict(a=1)
    state.evil = function  # type: ignore[attr-defined]
    whole = {
        "value": {"a": function},
        "key": {(function, 1): 1},
        "state": state,
        "within a list": {"a": [function]},
        "argument": Runs(OrderedDict, [("a", function)]),
        "hooks": {"a": (function, OrderedDict())},
    }[place]
    pickled = pickle.dumps(whole, protocol)
    try:
        pickle.loads(pickled)
    except TypeError:  # a result that is no key
        assert place == "key"
    assert marker.exists(), "the pickle would run"
    marker.rmdir() if marker.is_dir() else marker.unlink()
    file = write_pickle(tmp_path, pickled)
    with running_nothing():
        message = refusal(file)
    assert not marker.exists()
    assert f".{call}'" in message or ("opcode EMPTY_LIST" in message and place in ("within a list", "argument"))


RAW: dict[str, bytes] = {
    "INST": b"\x80\x02(X\x06\0\0\0touch ios\nsystem\n.",
    "OBJ": b"\x80\x02(cos\nsystem\nX\x01\0\0\0xo.",
    "NEWOBJ": b"\x80\x02" + name("collections", "OrderedDict") + b")\x81.",
    "NEWOBJ_EX": b"\x80\x04" + name("collections", "OrderedDict") + b")}\x92.",
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT2": b"\x80\x02\x83\x01\x01.",
    "EXT4": b"\x80\x02\x84\x01\x01\x01\x01.",
    "PERSID": b"\x80\x02P0\n.",
    "DUP": b"\x80\x02}2.",
    "POP": b"\x80\x02}}0.",
    "POP_MARK": b"\x80\x02}(1.",
    "BINBYTES": b"\x80\x03B\x01\0\0\0x.",
    "BYTEARRAY8": b"\x80\x05\x96\x01\0\0\0\0\0\0\0x.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "READONLY_BUFFER": b"\x80\x05}\x98.",
    "INT": b"\x80\x02I1\n.",
    "LONG4": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "BINFLOAT": b"\x80\x02G01234567.",
    "EMPTY_SET": b"\x80\x04\x8f.",
    "0xff": b"\x80\x02\xff.",
}


@pytest.mark.parametrize("opcode", RAW)
def test_other_opcodes_are_refused_by_name(tmp_path: Path, opcode: str) -> None:
    copyreg.add_extension("os", "system", 1)
    try:
        with running_nothing():
            message = refusal(write_pickle(tmp_path, RAW[opcode]))
    finally:
        copyreg.remove_extension("os", "system", 1)
    expected = "'os.system'" if opcode == "OBJ" else f"the pickle has the opcode {opcode}, which"
    assert expected in message and "nothing was run; convert the weights to safetensors" in message


def persistent(*items: bytes) -> bytes:
    return pickle_of(dictionary({"a": REBUILD_TENSOR + tuple_of(tuple_of(*items) + b"Q", *ARGUMENTS) + b"R"}))


ARGUMENTS = integer(0), integers((2, 3)), integers((3, 1)), FALSE, ORDERED_DICT
IDENTIFIER = text("storage"), name("torch", "FloatStorage"), text("0"), text("cpu"), integer(6)
NO_STORAGE = "the pickle has a persistent id that is not that of a storage"
OTHER_ARGUMENTS = "the pickle calls {} with other arguments than torch.save writes"


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (persistent(text("module"), *IDENTIFIER[1:]), NO_STORAGE),
        (persistent(*IDENTIFIER, integer(1)), NO_STORAGE),
        (persistent(*IDENTIFIER[:4]), NO_STORAGE),
        (persistent(text("storage"), name("collections", "OrderedDict"), *IDENTIFIER[2:]), NO_STORAGE),
        (persistent(text("storage"), text("torch FloatStorage"), *IDENTIFIER[2:]), NO_STORAGE),
        (persistent(*IDENTIFIER[:2], text("../../etc/passwd"), *IDENTIFIER[3:]), NO_STORAGE),
        (persistent(*IDENTIFIER[:2], text("0" * 10_000), *IDENTIFIER[3:]), NO_STORAGE),
        (persistent(*IDENTIFIER[:2], integer(0), *IDENTIFIER[3:]), NO_STORAGE),
        (persistent(*IDENTIFIER[:4], integer(-6)), NO_STORAGE),
        (persistent(*IDENTIFIER[:4], integer(2**62)), NO_STORAGE),
        (persistent(*IDENTIFIER[:4], text("6")), NO_STORAGE),
        (pickle_of(text("storage") + b"Q"), NO_STORAGE),
        (pickle_of(b"Q"), "BINPERSID lacks what it works on"),
        (pickle_of(name("os", "system")), "the pickle uses 'os.system', which no dictionary of tensors needs"),
        (pickle_of(name("torch", "load")), "the pickle uses 'torch.load'"),
        (pickle_of(name("torch._utils", "_rebuild_tensor_v3")), "the pickle uses 'torch._utils._rebuild_tensor_v3'"),
        (pickle_of(name("builtins", "eval")), "the pickle uses 'builtins.eval'"),
        (pickle_of(name("torch FloatStorage", "x")), "the pickle uses 'torch.FloatStorage x'"),
        (pickle_of(name("é" * 300, "x")), "GLOBAL"),
        (pickle_of(text("os") + text("system") + b"\x93"), "the pickle uses 'os.system'"),
        (pickle_of(integer(1) + text("x") + b"\x93"), "the pickle takes a name that is no text"),
        (pickle_of(text("os") + b"q\x00" + text("system") + b"q\x01h\x00h\x01\x93"), "the pickle uses 'os.system'"),
        (pickle_of(text("torch") + b"(" + text("FloatStorage") + b"\x93"), "STACK_GLOBAL lacks what it works on"),
        (pickle_of(b"h\x05"), "BINGET lacks what it works on"),
        (pickle_of(b"q\x00"), "BINPUT lacks what it works on"),
        (pickle_of(b"\x94"), "MEMOIZE lacks what it works on"),
        (pickle_of(b"(q\x00"), "BINPUT lacks what it works on"),
        (pickle_of(b"}(" + text("a") + b"u"), "SETITEMS lacks what it works on"),
        (pickle_of(b"}u"), "SETITEMS lacks what it works on"),
        (pickle_of(text("x") + text("a") + text("b") + b"s"), "sets items or a state of a value of type str"),
        (pickle_of(WEIGHT + b"}b"), "sets items or a state of a tensor, expected a dictionary"),
        (pickle_of(b"})Ns"), "a dictionary has a value of type tuple as a key"),
        (pickle_of(text("x") + b")R"), OTHER_ARGUMENTS.format("a value of type str")),
        (pickle_of(name("torch", "FloatStorage") + b")R"), OTHER_ARGUMENTS.format("FloatStorage")),
        (pickle_of(name("collections", "OrderedDict") + b"}\x85R"), OTHER_ARGUMENTS.format("OrderedDict")),
        (pickle_of(name("collections", "OrderedDict") + b"}R"), OTHER_ARGUMENTS.format("OrderedDict")),
        (pickle_of(REBUILD_TENSOR + b")R"), OTHER_ARGUMENTS.format("_rebuild_tensor_v2")),
        (
            pickle_of(REBUILD_TENSOR + tuple_of(SIX, *ARGUMENTS, b"}") + b"R"),
            OTHER_ARGUMENTS.format("_rebuild_tensor_v2"),
        ),
        (
            pickle_of(name("torch._utils", "_rebuild_parameter") + tuple_of(SIX, FALSE, ORDERED_DICT) + b"R"),
            OTHER_ARGUMENTS.format("_rebuild_parameter"),
        ),
        (pickle_of(b"}}"), "it ends with more or less than one value"),
        (pickle_of(b""), "it ends with more or less than one value"),
        (pickle_of(b"("), "it ends with more or less than one value"),
        (pickle_of(WEIGHT), "holds a tensor, expected a dictionary from names to tensors"),
        (pickle_of(dictionary({"epoch": integer(3)})), "'epoch' is a value of type int, expected a tensor"),
        (pickle_of(dictionary({"state_dict": b"}"})), "'state_dict' is a dictionary, expected a tensor"),
        (pickle_of(dictionary({"a": SIX})), "'a' is a value of type storage, expected a tensor"),
        (pickle_of(dictionary({"a\n": WEIGHT})), r"the tensor's name 'a\n' is not printable"),
        (pickle_of(b"}X\x03\0\0\0\xed\xa0\x80" + WEIGHT + b"s"), r"the tensor's name '\ud800' is not printable"),
        (b"\x80\x02}", "it has no end"),
        (b"", "it has no end"),
        (b"\x80\x02X\xff\0\0\0a.", "the pickle is damaged: BINUNICODE"),
        (b"\x80\x07}.", "the pickle has protocol 7, expected one of (2, 3, 4, 5)"),
    ],
)
def test_wrong_pickles_are_refused_with_what_is_wrong(tmp_path: Path, pickled: bytes, message: str) -> None:
    file = write_pickle(tmp_path, pickled)
    with running_nothing():
        assert message in refusal(file)


def test_a_dictionary_that_contains_itself_is_refused(tmp_path: Path) -> None:
    assert "'a' is a dictionary" in refusal(write_pickle(tmp_path, pickle_of(b"}q\x00" + text("a") + b"h\x00s")))


class Oracle(pickle.Unpickler):
    """Python's unpickler, in which names stand for themselves and calls for tuples."""

    def find_class(self, module: str, attribute: str) -> Any:
        class Named(dict[str, Any]):
            def __new__(cls, *arguments: Any) -> Any:
                return dict.__new__(cls) if attribute == "OrderedDict" else (attribute, arguments)

        Named.__name__ = attribute
        return Named

    def persistent_load(self, pid: Any) -> Any:
        return pid


def tensors_of_oracle(pickled: bytes) -> dict[str, Any]:
    """Return name -> key of the storage, dtype, offset, shape and strides."""
    found = {}
    for key, value in Oracle(io.BytesIO(pickled)).load().items():
        while value[0] == "_rebuild_parameter":
            value = value[1][0]
        stored, offset, shape, strides = value[1][:4]
        found[key] = (stored[2], stored[1].__name__, offset, shape, strides)
    return found


@pytest.mark.parametrize("file", ["protocol_2.bin", "protocol_4.pt"])
def test_mutated_pickles_run_nothing_and_give_an_error_or_what_pickle_reads(tmp_path: Path, file: str) -> None:
    with zipfile.ZipFile(GOLDEN / file) as archive:
        members = {entry.split("/", 1)[1]: archive.read(entry) for entry in archive.namelist()}
    chance, num_read, whole = random.Random(7), 0, members["data.pkl"]
    if whole[2:3] == b"\x95":  # a frame, which only says how much may be read at once
        whole = whole[:2] + whole[11:]
    for _ in range(200):
        pickled = mutate(chance, whole)
        mutated = write_container(tmp_path / "x.bin", {**members, "data.pkl": pickled})
        try:
            with running_nothing():
                found = read_torch_file(mutated)
        except ConfigError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
            continue
        num_read += 1
        expected = tensors_of_oracle(pickled)
        with zipfile.ZipFile(mutated) as archive:
            places = {key: archive.getinfo(f"head/data/{value[0]}") for key, value in expected.items()}
        assert list(found) == list(expected)
        for key, (_, kind, offset, shape, strides) in expected.items():
            dtype = STORAGES[f"torch {kind}"]
            begin = places[key].header_offset + 30 + len(places[key].filename) + len(places[key].extra)
            assert (found[key].dtype, found[key].shape, found[key].strides) == (dtype, shape, strides)
            assert found[key].begin == begin + offset * ITEM_BYTES[dtype]
    assert 5 <= num_read < 150, "both happen"
