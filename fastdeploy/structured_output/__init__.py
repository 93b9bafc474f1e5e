# SPDX-License-Identifier: Apache-2.0
"""Structured output: grammars, structural tags and reasoning budgets as token constraints."""
