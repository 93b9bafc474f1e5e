# SPDX-License-Identifier: Apache-2.0
"""Clients: whose request it is. The unit is the API key, or on a server without keys the connection's address."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from starlette.types import Scope

from fastdeploy.config.api_keys import ApiKey

MAX_CACHED_ADDRESSES = 4096
IPV6_PREFIX_BITS = 64  # a single host usually has all addresses of such a network
_CLIENT = "fastdeploy.client"
_PASSED_ON = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via", b"origin"})


@dataclass(frozen=True)
class Client:
    """An API key or an address, and what it may use.

    Attributes:
        id: a digest, which stands for the client in the engine.
        name: the name of the key; empty for an address.
        salt: separates what the engine stores for one key from other keys; empty for an address.
        weight, max_sequences, tokens_per_minute, is_admin: as in `ApiKey`.
    """

    id: str
    name: str = ""
    salt: str = ""
    weight: float = 1.0
    max_sequences: int | None = None
    tokens_per_minute: int | None = None
    is_admin: bool = False


class ClientKeys:
    """The clients of a server with API keys.

    Attributes:
        has_admin: at least one key is an administrator's.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._secret = secrets.token_bytes(32)
        self._clients = {self._digest(key.key.encode()): _client_of_key(key) for key in keys}
        self.has_admin = any(client.is_admin for client in self._clients.values())

    def find(self, key: bytes) -> Client | None:
        """Return the client whose key this is.

        Digests under a random secret are compared, so the time of a comparison tells nothing about the keys.
        """
        return self._clients.get(self._digest(key))

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=32, key=self._secret).digest()


def set_client(scope: Scope, client: Client) -> None:
    """Note whose request this is."""
    scope[_CLIENT] = client


def client_of(scope: Scope) -> Client:
    """Return whose request this is: the noted client, else that of the address."""
    client: Client | None = scope.get(_CLIENT)
    return client or _client_of_address(_host(scope))


def shown_client(scope: Scope) -> str:
    """Return the client's name for log lines: that of the key, else the address."""
    return client_of(scope).name or _host(scope) or "unknown address"


def is_from_this_machine(scope: Scope) -> bool:
    """Return whether a request comes over a loopback address, and neither a proxy nor a browser has passed it on."""
    try:
        address = ipaddress.ip_address(_host(scope))
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback and _PASSED_ON.isdisjoint(name for name, _ in scope["headers"])


def _host(scope: Scope) -> str:
    host: str = (scope.get("client") or ("",))[0]
    return host


@lru_cache(MAX_CACHED_ADDRESSES)
def _client_of_address(host: str) -> Client:
    return Client(_hexdigest(network_of(host).encode()))


def network_of(host: str) -> str:
    """Return the address of a client; of an IPv6 address only the network, and of a mapped one the IPv4 address."""
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), IPV6_PREFIX_BITS), strict=False))


def _client_of_key(key: ApiKey) -> Client:
    digest = _hexdigest(key.key.encode())
    return Client(digest, key.name, digest, key.weight, key.max_sequences, key.tokens_per_minute, key.admin)


def _hexdigest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
