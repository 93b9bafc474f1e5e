# SPDX-License-Identifier: Apache-2.0
"""Models: one decoder, a file per architecture family, a registry, and the weight loader."""
