# SPDX-License-Identifier: Apache-2.0
"""Proposers: what drafts the tokens that the target verifies."""
