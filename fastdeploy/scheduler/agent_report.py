# SPDX-License-Identifier: Apache-2.0
"""What an agent reports of itself, for `/metrics`, `/health` and the drain of the server."""

from __future__ import annotations

from collections import Counter

from fastdeploy.core.process import memory_bytes
from fastdeploy.core.stats import NodeStats
from fastdeploy.scheduler.agent_engine import AgentEngine
from fastdeploy.scheduler.agent_transfers import Transfers
from fastdeploy.scheduler.held_ticket import HeldState
from fastdeploy.scheduler.membership import Membership
from fastdeploy.scheduler.node_states import NodeStates


def make_report(
    states: NodeStates,
    membership: Membership,
    transfers: Transfers,
    engine: AgentEngine,
    is_redis_up: bool,
    num_redis_commands: int,
) -> NodeStats:
    """Return the agent's counters and its present state."""
    tickets = states.tickets.values()
    leased = [held for held in tickets if held.state is HeldState.HANDING]
    num_leased_slots = sum(held.num_slots for held in leased)
    return NodeStats(
        node=states.name,
        role=states.role.value,
        is_redis_up=is_redis_up,
        nodes=dict(Counter(record.role.value for record in membership.records.values())),
        queue_length=membership.queue_length,
        num_held=dict(Counter(held.state.name.lower() for held in tickets)),
        num_foreign=sum(not membership.is_own(held.ticket.owner) for held in tickets if held not in leased),
        num_orphaned=states.num_orphaned,
        num_filling_slots=engine.num_slots - engine.num_free_slots - num_leased_slots,
        num_leased_slots=num_leased_slots,
        num_slots=engine.num_slots,
        num_redis_commands=num_redis_commands,
        resident_bytes=memory_bytes()[1],
        transferred_bytes={name: dict(counts) for name, counts in transfers.transferred_bytes.items()},
        transfer_s=dict(transfers.seconds),
        transfer_failures={name: dict(counts) for name, counts in transfers.failures.items()},
        recomputed_tokens=dict(transfers.recomputed_tokens),
        handover_s=engine.handover_s,
    )
