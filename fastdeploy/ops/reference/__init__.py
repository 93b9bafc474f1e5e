# SPDX-License-Identifier: Apache-2.0
"""The operators in plain Paddle: the oracle of the tests and the fallback on devices without kernels."""
