# SPDX-License-Identifier: Apache-2.0
"""Messages as a broken or hostile process might write them to Redis: noise, cut and mutated ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import ErrorInfo, RequestMetrics, SpeculateMetrics, TokenDelta, TokenLogprobs
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.scheduler.messages import SCHEMA_VERSION, AbortAnswer, AbortCall, Host, NodeLoad, NodeRecord, encode
from fastdeploy.scheduler.request_states import (
    Abort,
    Claimed,
    Handed,
    Held,
    Holding,
    Image,
    Refused,
    Release,
    Renew,
    Resend,
    Role,
    Stage,
    Ticket,
    Tokens,
)

OWNER, NODE = "o", "d"
NUMBERS = range(6)
HOSTILE = (
    *(0, 1, -1, 2, 127, 128, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(
        math.nan,
        math.inf,
        -math.inf,
        1.5,
        None,
        True,
        False,
        "",
        "a",
        "ä\n\0",
        "x" * 300,
        "prefill",
        "error",
        b"",
        b"\xff",
    ),
    *([], [[]], [None], [0], {}, {"a": 1}, {1: 2.0}),
)


def source(number: int, leg: int = 1, seq: int = 5) -> tuple[int, int, str, int, int]:
    return number, leg, NODE, 1, seq


def image(leg: int = 1) -> Image:
    return Image(NODE, 1, leg, b"content")


def tickets() -> list[Any]:
    params = SamplingParams(
        n=2,
        seed=7,
        stop=["x"],
        logit_bias={3: 1.0},
        logprobs=2,
        bad_words_token_ids=[[1, 2]],
        allowed_token_ids=[1, 2, 3],
        logprob_token_ids=[4],
    )
    plain = GenerationRequest("client's id", [1, 2, 3], SamplingParams())
    rich = GenerationRequest("id", [5] * 40, params, "salt", 3, timeout_s=9.0, client_id="c", client_max_sequences=4)
    return [
        Ticket(OWNER, 0, 1, Stage.PREFILL, plain, [[]]),
        Ticket(OWNER, 1, 3, Stage.DECODE, rich, [[4, 5], None], 2, True, 8.5, image(2)),
        Ticket(OWNER, 2, 2, Stage.DECODE, plain, [[7]], image=image()),
    ]


def to_owner() -> list[Any]:
    logprobs = [TokenLogprobs(9, -0.5, 1, [(9, -0.5), (8, -1.5)], [(4, -9.5, 7)])]
    last = TokenDelta(
        "id",
        1,
        [9],
        ["ngram"],
        logprobs,
        [None, logprobs[0]],
        "stop",
        "x",
        True,
        3,
        RequestMetrics(),
        SpeculateMetrics(),
    )
    failed = TokenDelta("id", 0, finish_reason="error", error=ErrorInfo("timeout", "late"))
    merged = TokenDelta("id", 0, [1, 2, 3], ["mtp"], steps=[(2, ["mtp"]), (1, [])])
    messages: list[Any] = [
        *(Claimed(*source(number)) for number in NUMBERS),
        *(Tokens(*source(number), 0, merged) for number in NUMBERS),
        *(Tokens(*source(number), 0, last) for number in NUMBERS),
        Tokens(*source(1), 40, TokenDelta("id", 0, [1])),
        Tokens(*source(2), 0, failed),
        *(Handed(*source(number), image(), 3) for number in NUMBERS),
        Handed(*source(3), None),
        *(Refused(*source(number), kind, "n", "text") for number in NUMBERS for kind in ("room", "invalid")),
        Holding(NODE, 1, 9, [Held(0, 1, [3, 0], 5), Held(1, 1, [9]), Held(2, 1, [0], 0, image())], True),
        Holding(NODE, 1, 9, []),
        AbortCall("n.0.b", 1, ["id", "other"], "salt"),
        AbortCall("n.0.b", 2, None, ""),
        AbortAnswer(1, "n.0.b", [("id", 3)]),
    ]
    return [[message] for message in messages] + [messages[:9]]


def to_node() -> list[Any]:
    messages: list[Any] = []
    for number in NUMBERS:
        keys = (OWNER, number, 1)
        messages += [Abort(*keys), Release(*keys), Renew(*keys), Resend(*keys, 0, 1), Resend(*keys, 1, 0)]
    return [[message] for message in messages] + [messages[:9]]


def records() -> list[Any]:
    host = Host("boot", "net", 1000)
    load = NodeLoad(1, 2, 3, 4, 5, 6)
    return [NodeRecord(3, 1, Role.DECODE, "g", host, {"target": "x"}, {"ipc": {"path": "/p"}}, ["n.0.a"], load, "1.0")]


def mutated(values: list[Any], count: int, seed: int) -> Iterator[bytes]:
    """Yield broken encodings of some values, which often can be decoded all the same."""
    numbers = random.Random(seed)
    encodings = [encode(value) for value in values]
    for _ in range(count):
        data = numbers.choice(encodings)
        kind = numbers.random()
        if kind < 0.1:
            yield numbers.randbytes(numbers.randrange(60))
        elif kind < 0.2:
            yield bytes([SCHEMA_VERSION]) + numbers.randbytes(numbers.randrange(60))
        elif kind < 0.3:
            yield data[: numbers.randrange(len(data))]
        elif kind < 0.5:
            yield _with_other_bytes(data, numbers)
        else:
            yield _with_other_values(data, numbers)


def _with_other_bytes(data: bytes, numbers: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(numbers.choice((1, 1, 2, 5))):
        changed[numbers.randrange(len(changed))] = numbers.randrange(256)
    return bytes(changed)


def _with_other_values(data: bytes, numbers: random.Random) -> bytes:
    """Replace, remove or add one to three of the values in an encoding, whatever their depth."""
    value = msgspec.msgpack.decode(data[1:], strict=False)
    for _ in range(numbers.choice((1, 1, 1, 2, 3))):
        value = _change(value, numbers)
    return data[:1] + msgspec.msgpack.encode(value)


def _change(value: Any, numbers: random.Random) -> Any:
    if not isinstance(value, list | dict) or not value or numbers.random() < 0.05:
        return _plausible(value, numbers) if numbers.random() < 0.7 else numbers.choice(HOSTILE)
    if isinstance(value, dict):
        key = numbers.choice(list(value))
        return {**value, key: _change(value[key], numbers)}
    index, kind = numbers.randrange(len(value)), numbers.random()
    if kind < 0.1:
        return value[:index] + value[index + 1 :]
    if kind < 0.2:
        return [*value[:index], numbers.choice(HOSTILE), *value[index:]]
    return [*value[:index], _change(value[index], numbers), *value[index + 1 :]]


def _plausible(value: Any, numbers: random.Random) -> Any:
    """Return another value of the same type, which may stand there."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return numbers.choice((0, 1, 2, 3, 4, 5, 9, 128, min(value + 1, 2**63), max(0, value - 1)))
    if isinstance(value, float):
        return numbers.choice((0.0, 0.5, -value, 100.0))
    if isinstance(value, str):
        return numbers.choice((OWNER, NODE, "p", "own", "room", "invalid", "stop", "prefill", "decode", value + "x"))
    return numbers.choice((None, value))
