# SPDX-License-Identifier: Apache-2.0
"""One package per device, the only code that knows it; see `fastdeploy.ops.backend`."""
