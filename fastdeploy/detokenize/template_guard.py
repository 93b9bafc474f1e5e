# SPDX-License-Identifier: Apache-2.0
"""Compiles limits of time and size into chat templates, so that they can be rendered in the process of the server.

Jinja's sandbox restricts what a template can access, but a loop could run for days. A call at the beginning of every
body that can run repeatedly looks at the processor time of the thread, and everything that makes a value from others
checks its size first (`template_sizes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from markupsafe import Markup, escape

from fastdeploy.detokenize.template_budget import BUDGET, tick
from fastdeploy.detokenize.template_sizes import (
    FILTERS,
    MAX_BITS,
    METHODS,
    GuardedEscapeFormatter,
    GuardedFormatter,
    check_printed,
    divide,
    guarded_method,
    modulo,
    multiply,
    power,
    to_text,
)

SMALL_SIZE = 1024  # characters; shorter texts do not count, because making one takes longer than its memory is worth
MAX_PARTS = 16  # of a sum that is made at once
_TICK, _ADD, _KEEP = "guard: tick", "guard: add", "guard: keep"  # filters, whose names no template can write
_UNGUARDED = {  # their time and result are at most linear in their input
    *("abs", "attr", "count", "d", "default", "first", "float", "items", "last", "length", "lower", "safe", "trim"),
    "upper",
}
_SELECTIONS = ("select", "reject", "selectattr", "rejectattr")
_MADE_OF_ARGUMENTS = ("varargs", "kwargs")


@pass_context  # so that the compiler does not evaluate it
def _tick(context: Context, value: Any) -> bool:
    tick()
    return True


@pass_context
def _add(context: Context, *parts: Any) -> Any:
    """Return the sum of the parts, from left to right."""
    for part in parts:
        if type(part) is not str:
            return _add_one_by_one(*parts)
    text = "".join(parts)
    if len(text) > SMALL_SIZE:
        BUDGET.spend(len(text))
    return text


def _add_one_by_one(total: Any, *parts: Any) -> Any:
    for part in parts:
        total = total + part
        if not isinstance(total, int):  # templates make long lists by adding an item to those before
            BUDGET.spend(check_printed(part if isinstance(total, (list, tuple)) else total))
    return total


@pass_context
def _keep(context: Context, value: Any) -> Any:
    """Return a container that the template has made, if its size is within the limits."""
    BUDGET.spend(check_printed(value))
    return value


def _join(parts: Iterable[Any]) -> str:
    """Return the texts of all parts, joined."""
    texts = [to_text(part) for part in parts]
    BUDGET.spend(sum(map(len, texts)))
    return "".join(texts)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    made = dict(*args, **kwargs)
    BUDGET.spend(check_printed(made))
    return made


def _escape(value: Any) -> Markup:
    if not hasattr(value, "__html__"):
        value = to_text(value)
    return escape(value)


def _join_markup(parts: Iterable[Any]) -> str:
    """Return the texts of all parts, joined; escaped if one of them is markup."""
    listed = list(parts)
    is_markup = any(hasattr(part, "__html__") for part in listed)
    return Markup(_join(map(_escape, listed))) if is_markup else _join(listed)


_FUNCTIONS = {"str": to_text, "str_join": _join, "markup_join": _join_markup, "escape": _escape}
"""Functions that compiled templates call to make texts."""


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    """Yield items that a filter makes one by one, as a loop."""
    for item in items:
        tick()
        yield item


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks its arguments and its result, and counts as a repetition."""
    check, is_selection = FILTERS.get(name), name in _SELECTIONS
    argument = _FIRST_ARGUMENTS.get(getattr(getattr(function, "jinja_pass_arg", None), "name", ""))

    @pass_context
    def guarded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        tick()
        if is_selection and value:
            value = _counted(value)  # it may yield nothing for a long time
        if check is not None:
            value = list(value) if isinstance(value, Iterator) else value
            check(value, *args, **kwargs)
        if argument is None:
            return _checked(function(value, *args, **kwargs))
        return _checked(function(argument(context), value, *args, **kwargs))

    return guarded


_FIRST_ARGUMENTS: dict[str, Callable[[Context], Any]] = {
    "context": lambda context: context,
    "eval_context": lambda context: context.eval_ctx,
    "environment": lambda context: context.environment,
}
"""What Jinja passes to a filter before its value, by the name that the filter's decorator has given it."""


def _checked(result: Any) -> Any:
    """Return the result of a filter, if its size is within the limits."""
    if type(result) is str:
        if len(result) > SMALL_SIZE:
            BUDGET.spend(len(result))
        return result
    if isinstance(result, (str, list, tuple, dict)):
        BUDGET.spend(check_printed(result))
    return _counted(result) if isinstance(result, Iterator) else result


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with limits of time and size."""

    concat = staticmethod(_join)
    intercepted_binops = frozenset({"*", "**", "%", "//"})

    def __init__(self, **options: Any) -> None:
        """Create an environment; options are those of `jinja2.Environment`."""
        super().__init__(**options)
        self.binop_table |= {"*": multiply, "**": power, "%": modulo, "//": divide}
        del self.globals["lipsum"]
        self.globals["dict"] = _make_dict

    def guard_filters(self) -> None:
        """Guard the filters that the environment has; it must be called after the last one is set."""
        for name, function in self.filters.items():
            if name not in _UNGUARDED:
                self.filters[name] = _guarded_filter(name, function)
        self.filters |= {_TICK: _tick, _ADD: _add, _KEEP: _keep}

    def compile_guarded(self, tree: nodes.Template) -> jinja2.Template:
        """Compile the tree of a template, which is changed, with the calls that guard it."""
        _Inserter(self).visit(tree)
        template = self.from_string(tree)
        template.root_render_func.__globals__.update(_FUNCTIONS)
        return template

    def wrap_str_format(self, value: Any) -> Callable[..., Any] | None:
        """Return a function in place of a method whose result can be long; None keeps what the template accesses."""
        if not isinstance(value, (BuiltinMethodType, MethodType)):
            return None
        if value.__name__ in METHODS:
            return guarded_method(value)
        pattern = value.__self__
        if value.__name__ not in ("format", "format_map") or not isinstance(pattern, str):
            return None

        def formatted(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
            is_markup = isinstance(pattern, Markup)
            formatter = GuardedEscapeFormatter(self, escape=escape) if is_markup else GuardedFormatter(self)
            return type(pattern)(formatter.vformat(pattern, args, kwargs))

        if value.__name__ == "format_map":
            return lambda values: formatted((), values)
        return lambda *args, **kwargs: formatted(args, kwargs)


class _Inserter(NodeTransformer):
    """Inserts calls of the guard's filters into the tree of a template."""

    def __init__(self, environment: GuardedEnvironment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(self._call(_TICK, node.test.lineno), node.test, lineno=node.test.lineno)
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._repeatable(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._repeatable(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._repeatable(node)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        self.generic_visit(node)
        left, right = node.left, node.right
        if isinstance(left, nodes.Const) and isinstance(right, nodes.Const):
            return node
        if isinstance(left, nodes.Filter) and left.name == _ADD and len(left.args) < MAX_PARTS - 1:
            left.args.append(right)
            return left
        return self._call(_ADD, node.lineno, left, right)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._container(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._container(node, node.items) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._container(node, [item.value for item in node.items])

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, int) and node.value.bit_length() > MAX_BITS:
            raise ValueError(f"an integer has more than {MAX_BITS} bits")
        return node

    def _repeatable(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        used = {name.name for name in node.find_all(nodes.Name)}
        for name in filter(used.__contains__, _MADE_OF_ARGUMENTS):  # containers that no literal makes
            argument = nodes.Name(name, "load", lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(self._call(_KEEP, node.lineno, argument), lineno=node.lineno))
        return self._with_tick(node)

    def _with_tick(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        node.body.insert(0, nodes.ExprStmt(self._call(_TICK, node.lineno), lineno=node.lineno))
        return node

    def _container(self, node: nodes.Expr, values: list[nodes.Expr]) -> nodes.Node:
        self.generic_visit(node)
        return node if all(isinstance(value, nodes.Const) for value in values) else self._call(_KEEP, node.lineno, node)

    def _call(self, name: str, lineno: int, value: nodes.Expr | None = None, *args: nodes.Expr) -> nodes.Filter:
        """Return the call of a filter."""
        value = nodes.Const(None, lineno=lineno) if value is None else value
        call = nodes.Filter(value, name, list(args), [], None, None, lineno=lineno)
        call.set_environment(self._environment)
        return call
