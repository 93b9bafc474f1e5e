# SPDX-License-Identifier: Apache-2.0
"""Limits of what one operation of a chat template may make: a single call of C code cannot be stopped once it runs.

No value that a template makes prints more than `MAX_SIZE` characters, so that comparing, sorting and printing values
takes a bounded time: `[a, a]`, nested sixty times, would be small in memory and endless as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from jinja2.runtime import Undefined
from jinja2.sandbox import SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import EscapeFormatter

from fastdeploy.core.errors import TemplateLimitError
from fastdeploy.detokenize.template_budget import BUDGET, MAX_SIZE, check_size

MAX_SLOW_SIZE = 2**18  # characters of the input of filters that are written in Python
MAX_DEPTH = 256  # containers in each other; printing, comparing and writing JSON recurse
MAX_BITS = 2**16  # of integers, whose multiplication and division take more than linear time
MAX_PRECISION = 300  # of `round`: floats have no more decimal places
MAX_BATCH = 1024
MAX_INDENT = 256
BYTES_PER_ITEM = 8
_NUMBER = re.compile("[0-9]+")
_FIELD = re.compile(r"%(?:\([^)]*\))?[-#0 +]*([0-9]{1,18})?(?:\.([0-9]{1,18}))?")  # of the operator %
_SCALARS = (int, float, type(None), Undefined)
_VIEWS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


def check_printed(*values: Any, limit: int = MAX_SIZE) -> int:
    """Return about how many characters the values have when they are printed; raise TemplateLimitError over a limit."""
    size, depth, level = 0, 0, list(values)
    while level:
        parts: list[Any] = []
        for item in level:
            size += len(item) if isinstance(item, (str, bytes)) else BYTES_PER_ITEM
            if isinstance(item, Mapping):
                parts.extend(item)
                parts.extend(item.values())
            elif isinstance(item, _VIEWS):
                parts.extend(item)
            elif isinstance(item, Namespace):
                parts.append(object.__getattribute__(item, "_Namespace__attrs"))  # which are all that it prints
            if size + BYTES_PER_ITEM * len(parts) > limit:
                check_size(MAX_SIZE + 1)
        BUDGET.check_time()
        level, depth = parts, depth + 1
        if depth > MAX_DEPTH:
            raise TemplateLimitError(
                "messages", f"the chat template uses more than {MAX_DEPTH} containers in each other"
            )
    return size


def to_text(value: Any) -> str:
    """Return a value as text."""
    if type(value) is str:
        return value
    if not isinstance(value, _SCALARS):
        check_printed(value)
    return str(value)


def multiply(left: Any, right: Any) -> Any:
    """Return `left * right`."""
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, (str, bytes, list, tuple)):
            check_size(check_printed(value) * max(0, count))
    if isinstance(left, int) and isinstance(right, int):
        check_size(MAX_SIZE * (left.bit_length() + right.bit_length()) // MAX_BITS)
    return left * right


def power(left: Any, right: Any) -> Any:
    """Return `left ** right`."""
    if isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
        check_size(MAX_SIZE * left.bit_length() * right // MAX_BITS)
    return left**right


def divide(left: Any, right: Any) -> Any:
    """Return `left // right`."""
    _check_bits(left)
    return left // right


def modulo(left: Any, right: Any) -> Any:
    """Return `left % right`: the remainder, or a formatted text."""
    _check_bits(left)
    if isinstance(left, (str, bytes)):
        _check_percent(left if isinstance(left, str) else left.decode("latin-1"), right)
    return left % right


def _check_bits(value: Any) -> None:
    if isinstance(value, int):
        check_size(MAX_SIZE * value.bit_length() // MAX_BITS)


def _check_percent(pattern: str, given: Any) -> None:
    """Check the length of `pattern % given`: each field has a width, a precision, and a value of any length."""
    size = len(pattern) + sum(int(number) for field in _FIELD.findall(pattern) for number in field if number)
    values = given if isinstance(given, tuple) else (given,)
    if "*" in pattern:
        size += pattern.count("*") * max((abs(value) for value in values if isinstance(value, int)), default=0)
    num_uses = max(1, pattern.count("%")) if isinstance(given, Mapping) else 1
    check_size(size + num_uses * check_printed(*values))


class GuardedFormatter(SandboxedFormatter):
    """`str.format`, whose fields have widths and values of any length."""

    def __init__(self, environment: Any, **options: Any) -> None:
        super().__init__(environment, **options)
        self._length = 0

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        """Return the value of a field after `!r` or `!s`."""
        if conversion:
            self._length += check_printed(value)
            check_size(self._length)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return the text of a field."""
        self._length += check_printed(value) + sum(int(number[:18]) for number in _NUMBER.findall(format_spec))
        check_size(self._length)
        return str(super().format_field(value, format_spec))


class GuardedEscapeFormatter(GuardedFormatter, EscapeFormatter):
    """`Markup.format`."""


def _check_width(text: Any, width: Any = 80, *others: Any, **options: Any) -> None:
    if isinstance(width, int):
        check_size(width)


def _check_tabs(text: Any, tabsize: Any = 8) -> None:
    check_size(check_printed(text) * max(1, int(tabsize)))


def _check_replace(text: Any, old: Any, new: Any, count: Any = None) -> None:
    text, old, new = to_text(text), to_text(old), to_text(new)
    check_size(len(text) + text.count(old) * len(new))


def _check_join(separator: Any, items: Any) -> None:
    check_size(check_printed(items) + check_printed(separator) * len(items))


def _check_translate(text: Any, table: Any) -> None:
    values = table.values() if isinstance(table, Mapping) else [table]
    check_size(check_printed(text) * max((check_printed(value) for value in values), default=0))


def _check_items(container: Any, *others: Any, **options: Any) -> None:
    check_printed(container, *others, *options.values())


def _check_fromkeys(mapping: Any, keys: Any, value: Any = None) -> None:
    check_size(check_printed(keys) + len(keys) * check_printed(value))


METHODS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _check_width),
    "expandtabs": _check_tabs,
    "replace": _check_replace,
    "join": _check_join,
    "translate": _check_translate,
    "fromkeys": _check_fromkeys,
}
"""Methods of built-in types whose result can be much longer than the object: checks of the object and the arguments."""


def guarded_method(method: Any) -> Callable[..., Any]:
    """Return a method of `METHODS` that checks its arguments."""
    check = METHODS[method.__name__]

    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
        check(method.__self__, *args, **kwargs)
        return method(*args, **kwargs)

    return call


def _check_indent(text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    text = to_text(text)
    num_lines = 1 + len(text.splitlines())
    check_size(len(text) + num_lines * (width if isinstance(width, int) else len(to_text(width))))


def _check_format(pattern: Any, *args: Any, **kwargs: Any) -> None:
    _check_percent(to_text(pattern), kwargs or args)


def _check_joined(items: Any, d: Any = "", attribute: Any = None) -> None:
    _check_join(d, items)


def _check_sum(items: Any, attribute: Any = None, start: Any = 0) -> None:
    size = check_printed(items)
    if not isinstance(start, (int, float)):  # each addition copies what was added before
        check_size(len(items) * (size // 64))


def _check_batch(items: Any, linecount: Any, fill_with: Any = None) -> None:
    if isinstance(linecount, int):
        check_size(MAX_SIZE * linecount // MAX_BATCH)


def _check_round(value: Any, precision: Any = 0, method: Any = "common") -> None:
    if isinstance(precision, int):
        check_size(MAX_SIZE * precision // MAX_PRECISION)


def _check_int(value: Any, default: Any = 0, base: Any = 10) -> None:
    if isinstance(value, str):
        check_size(MAX_SIZE * len(value) // MAX_BITS)


def _check_slow(*args: Any, **kwargs: Any) -> None:
    check_printed(*args, *kwargs.values(), limit=MAX_SLOW_SIZE)


def _check_wrapped(
    text: Any,
    width: Any = 79,
    break_long_words: Any = True,
    wrapstring: Any = None,
    break_on_hyphens: Any = True,
) -> None:
    _check_slow(text)
    if wrapstring is not None:
        check_size(check_printed(text) * check_printed(wrapstring))


def _check_json(value: Any, ensure_ascii: Any = False, indent: Any = None, **options: Any) -> None:
    check_printed(value)
    _check_slow(indent, options)
    if isinstance(indent, int):
        check_size(MAX_SIZE * indent // MAX_INDENT)
    if indent is not None or options:  # deep values have long lines
        size = 0
        for piece in json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, **options).iterencode(value):
            size += len(piece)
            check_size(size)


FILTERS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "indent": _check_indent,
    "replace": _check_replace,
    "format": _check_format,
    "join": _check_joined,
    "sum": _check_sum,
    "batch": _check_batch,
    "round": _check_round,
    "int": _check_int,
    "wordwrap": _check_wrapped,
    "tojson": _check_json,
    **dict.fromkeys(("sort", "unique", "min", "max", "groupby", "dictsort", "string"), _check_items),
    **dict.fromkeys(("escape", "e", "forceescape"), _check_items),
    **dict.fromkeys(("urlize", "striptags", "title", "wordcount", "urlencode", "xmlattr", "pprint"), _check_slow),
}
"""Filters whose time or result can be much larger than their input: checks of the arguments."""
