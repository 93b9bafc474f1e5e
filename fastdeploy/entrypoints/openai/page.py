# SPDX-License-Identifier: Apache-2.0
"""GET /: a page to try a prompt, which shows where each token came from. It loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response


async def page(request: Request) -> Response:
    """Return the page."""
    content, policy = _page()
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return Response(content, headers=headers, media_type="text/html")


@lru_cache(maxsize=1)
def _page() -> tuple[str, str]:
    """Return the page and the policy that lets a browser run this script, ask this server, and nothing else."""
    content = resources.files("fastdeploy").joinpath("assets", "page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; connect-src 'self'; script-src {_digest(content, 'script')}; "
        f"style-src {_digest(content, 'style')}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return content, policy


def _digest(content: str, element: str) -> str:
    found = re.search(rf"<{element}>(.*?)</{element}>", content, re.DOTALL)
    assert found is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(found.group(1).encode()).digest()).decode()}'"
