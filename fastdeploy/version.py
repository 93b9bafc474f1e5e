# SPDX-License-Identifier: Apache-2.0
"""The version of the package; the operator libraries carry the same string and are refused when it differs."""

__version__ = "0.1.0"
