# SPDX-License-Identifier: Apache-2.0
"""Finds out whether a chat template distinguishes a message without content from one with empty content."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jinja2 import nodes

KEY = "content"


def compares_content_with_none(template: nodes.Template) -> bool:
    """Return whether a template compares the content of a message with `none`, with `is` or with `==`.

    The content is `x.content`, `x['content']`, `x.get('content')`, or a variable that is named `content` or is set to
    one of these.
    """
    names = {KEY}
    for assignment in template.find_all(nodes.Assign):  # in the order of the text
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_is_content(tested, names) for tested in _tested_for_none(template))


def _tested_for_none(template: nodes.Template) -> list[nodes.Node]:
    """Return the expressions that are compared with `none`."""
    tested: list[nodes.Node] = [test.node for test in template.find_all(nodes.Test) if test.name == "none"]
    for compare in template.find_all(nodes.Compare):
        sides = [compare.expr, *(operand.expr for operand in compare.ops if operand.op in ("eq", "ne"))]
        if any(_is_constant(side, None) for side in sides):
            tested += sides
    return tested


def _is_content(node: nodes.Node, names: Collection[str]) -> bool:
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == KEY
        case nodes.Getitem():
            return _is_constant(node.arg, KEY)
        case nodes.Call():
            function = node.node
            is_get = isinstance(function, nodes.Getattr) and function.attr == "get"
            return is_get and bool(node.args) and _is_constant(node.args[0], KEY)
    return False


def _is_constant(node: nodes.Node, value: Any) -> bool:
    return isinstance(node, nodes.Const) and node.value == value
