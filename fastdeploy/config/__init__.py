# SPDX-License-Identifier: Apache-2.0
"""Configuration: one frozen dataclass per component, and the one reader of the environment."""
