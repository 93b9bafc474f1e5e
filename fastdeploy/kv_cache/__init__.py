# SPDX-License-Identifier: Apache-2.0
"""Block management of the KV cache: allocation, reference counts and prefix caching."""
