# SPDX-License-Identifier: Apache-2.0
"""The URL of a Redis server as far as the configuration needs it: its scheme, and how to show it without secrets."""

from __future__ import annotations

from fastdeploy.core.errors import ConfigError

SCHEMES = ("redis", "rediss", "unix", "sentinel", "cluster")
MASK = "***"
_PUBLIC_OPTIONS = ("ca", "db", "protocol", "tls")


def masked(url: str) -> str:
    """Return a URL without its user and password, and without the values of options that might be secrets."""
    scheme, separator, rest = url.partition("://")
    _, at, rest = rest.rpartition("@")
    address, question, options = rest.partition("?")
    shown = "&".join(_masked_option(option) for option in options.split("&")) if options else ""
    return f"{scheme}{separator}{MASK + at if at else ''}{address}{question}{shown}"


def credentials(url: str) -> tuple[str, str]:
    """Return user and password of a URL as they are written there; "" for what it lacks."""
    userinfo = url.partition("://")[2].rpartition("@")[0]
    username, _, password = userinfo.partition(":")
    return username, password


def check_scheme(url: str, field: str) -> None:
    """Raise ConfigError, which does not show the URL, unless it has a known scheme with something behind it."""
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES or not rest:
        raise ConfigError(
            field, f"expected a URL that begins with one of {', '.join(f'{name}://' for name in SCHEMES)}"
        )


def _masked_option(option: str) -> str:
    name, equals, _ = option.partition("=")
    return option if name in _PUBLIC_OPTIONS else f"{name}{equals}{MASK if equals else ''}"
