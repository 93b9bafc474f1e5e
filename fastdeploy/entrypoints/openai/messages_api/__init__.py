# SPDX-License-Identifier: Apache-2.0
"""Anthropic's /v1/messages over a turn of a chat."""
