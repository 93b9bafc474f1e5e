# SPDX-License-Identifier: Apache-2.0
"""API keys: who comes in, and what separates one key's requests from another's."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from fastdeploy.entrypoints.openai.errors import ApiError, error_response

OPEN_PATHS = ("/", "/health", "/ping", "/metrics", "/version")  # probes, dashboards and the page bring no key
_SALT = "fastdeploy.key_salt"


def key_salt(scope: Scope) -> str:
    """Return what marks the requests of this client's key; empty where no keys are asked for."""
    salt: str = scope.get(_SALT, "")
    return salt


class KeyCheck:
    """Lets in who brings one of the keys as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is open or brings a key; answer 401 to the rest."""
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = self._known_key(scope)
        if key is None:
            error = ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error)(scope, receive, send)
            return
        scope[_SALT] = hashlib.blake2b(key, digest_size=16).hexdigest()
        await self._app(scope, receive, send)

    def _known_key(self, scope: Scope) -> bytes | None:
        brought = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = brought.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]  # all, so that time tells nothing
        return key.strip() if kind.lower() == b"bearer" and any(matches) else None
