# SPDX-License-Identifier: Apache-2.0
"""Layers of a decoder: thin objects over fastdeploy.ops that own weights and write into given buffers."""
