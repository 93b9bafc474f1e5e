# SPDX-License-Identifier: Apache-2.0
"""The engine: plans steps, runs them, and keeps the ledger of every request."""
