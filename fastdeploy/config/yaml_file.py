# SPDX-License-Identifier: Apache-2.0
"""The file of `--config`: YAML in which no key stands twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fastdeploy.core.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML itself would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise _TwiceError(key.value, key.start_mark.line + 1)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _TwiceError(Exception):
    def __init__(self, key: str, line: int) -> None:
        super().__init__(key)
        self.key, self.line = key, line


def read_yaml_mapping(path: str) -> dict[str, Any]:
    """Return the file's mapping; keys without a value are left out.

    Raises:
        ConfigError: no such file, no YAML, no mapping, or a key that stands twice; names the file.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except _TwiceError as error:
        raise ConfigError(error.key, f"stands twice, the second time in line {error.line} of {path}") from None
    except OSError as error:
        raise ConfigError("--config", f"cannot read {path!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"{path!r} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError("--config", f"{path!r} holds no mapping of flags")
    return {str(name): value for name, value in content.items() if value is not None}
