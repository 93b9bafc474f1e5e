# SPDX-License-Identifier: Apache-2.0
"""The CPU: a library of Paddle operators, compiled for several instruction sets, and what calls it.

The library is chosen and checked in `library`, and `graph` captures its operators. Every other module holds the kernels
of the operator family of the same name in `fastdeploy.ops`.
"""
