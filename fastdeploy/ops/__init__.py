# SPDX-License-Identifier: Apache-2.0
"""Operators: typed wrappers, a Paddle reference for each, and one package of native kernels per device.

`host`, `text_batch` and `suffix_cache` run without Paddle.
"""
