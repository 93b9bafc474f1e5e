# SPDX-License-Identifier: Apache-2.0
"""Reads the constant texts of a chat template from its syntax tree."""

from __future__ import annotations

from jinja2 import nodes

EXPRESSION = "\0"


def constant_text(template: nodes.Template) -> str:
    """Return all constants that a template can print, in the order in which they are written.

    What is printed between two of them, if anything, is `EXPRESSION`. Branches and loops are ignored.
    """
    text = ""
    for output in template.find_all(nodes.Output):
        for piece in map(_text, output.nodes):
            text += piece if piece != EXPRESSION or not text.endswith(EXPRESSION) else ""
    return text


def has_constant(template: nodes.Template, value: str) -> bool:
    """Return whether a text is one of the constants in the expressions of a template."""
    return any(constant.value == value for constant in template.find_all(nodes.Const))


def _text(node: nodes.Node) -> str:
    match node:
        case nodes.TemplateData():
            return node.data
        case nodes.Const(value=str(text)):
            return text
        case nodes.Add():
            return _text(node.left) + _text(node.right)
        case nodes.Concat():
            return "".join(map(_text, node.nodes))
    return EXPRESSION
