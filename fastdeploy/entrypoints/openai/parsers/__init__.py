# SPDX-License-Identifier: Apache-2.0
"""Parsers that split the text of a model into reasoning, content and tool calls."""
