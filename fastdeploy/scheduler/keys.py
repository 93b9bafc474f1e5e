# SPDX-License-Identifier: Apache-2.0
"""Names of the keys in Redis. The topic in braces keeps all keys of a topic in one slot of a Redis Cluster.

| key | type | content |
| --- | --- | --- |
| `{topic}:node:NODE` | string with a TTL | a node's heartbeat: `NodeRecord` |
| `{topic}:owner:OWNER` | string with a TTL | an owner's heartbeat: its count |
| `{topic}:nodes`, `{topic}:owners` | set | names, to look up the keys above |
| `{topic}:q:GROUP:STAGE`, and with `:NODE` | stream, group `nodes` | tickets, the second kind for the node of a hint |
| `{topic}:in:NODE` | stream | messages of owners to a node |
| `{topic}:out:OWNER` | stream | messages of nodes and other owners to an owner |
| `{topic}:p:GROUP:HASH` | string with a TTL | the node that last computed the prefix of this hash |

A group is a digest of what decides the bits of a text; nodes of unlike groups share nothing but the names.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy.scheduler.request_states import Stage

CONSUMER_GROUP = "nodes"


@dataclass(frozen=True)
class Keys:
    """The names for one topic and group."""

    topic: str
    group: str

    def node(self, node: str) -> str:
        """Return the key of a node's heartbeat."""
        return f"{{{self.topic}}}:node:{node}"

    def owner(self, owner: str) -> str:
        """Return the key of an owner's heartbeat."""
        return f"{{{self.topic}}}:owner:{owner}"

    @property
    def nodes(self) -> str:
        """Return the key of the set of nodes."""
        return f"{{{self.topic}}}:nodes"

    @property
    def owners(self) -> str:
        """Return the key of the set of owners."""
        return f"{{{self.topic}}}:owners"

    def queue(self, stage: Stage, hint: str = "") -> str:
        """Return the key of a queue: the shared one, or that of a node."""
        return f"{{{self.topic}}}:q:{self.group}:{stage.value}" + (f":{hint}" if hint else "")

    def node_inbox(self, node: str) -> str:
        """Return the key of the stream that a node reads."""
        return f"{{{self.topic}}}:in:{node}"

    def owner_inbox(self, owner: str) -> str:
        """Return the key of the stream that an owner reads."""
        return f"{{{self.topic}}}:out:{owner}"

    def prefix(self, block_hash: bytes) -> str:
        """Return the key of a prefix."""
        return f"{{{self.topic}}}:p:{self.group}:{block_hash.hex()}"
