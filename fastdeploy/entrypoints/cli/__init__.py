# SPDX-License-Identifier: Apache-2.0
"""The `fastdeploy` command."""
