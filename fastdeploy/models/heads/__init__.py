# SPDX-License-Identifier: Apache-2.0
"""Trained draft heads: small models that draft from states of their target."""
