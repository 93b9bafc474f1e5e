# SPDX-License-Identifier: Apache-2.0
"""The vocabulary every other package speaks: requests, sampling parameters, plans, results, errors."""
