# SPDX-License-Identifier: Apache-2.0
"""Between processes of one user on one machine: the engine maps the peer's arena and copies from it."""
