# SPDX-License-Identifier: Apache-2.0
"""Speculation: proposers of draft tokens. Verification is an operator; the engine does not know the methods apart."""
