# SPDX-License-Identifier: Apache-2.0
"""Trains, exports and measures the demonstration model that FastDeploy ships with."""
