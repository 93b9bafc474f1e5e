# SPDX-License-Identifier: Apache-2.0
"""Adaptive length: how many drafts each request gets in a step."""
