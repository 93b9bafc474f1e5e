# SPDX-License-Identifier: Apache-2.0
"""Models: one file per architecture family over one dense decoder, a registry, and the weight loader."""
