# SPDX-License-Identifier: Apache-2.0
"""From a model's text to a message: reasoning, content and calls of tools."""
