# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs: a library with a C interface, called through ctypes, and Paddle for allocating and loading.

`library` loads and calls it, `plugin` makes the device known to Paddle, `memory` holds what the host exchanges with the
device, and `graph` captures launches. Every other module holds the kernels of the operator family of the same name in
`fastdeploy.ops`. None of them knows whether the device is emulated.
"""
