# SPDX-License-Identifier: Apache-2.0
"""Types that all packages use: requests, sampling parameters, plans, results, errors."""
