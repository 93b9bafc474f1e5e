# SPDX-License-Identifier: Apache-2.0
"""YAML without repeated keys, and the file of `--config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fastdeploy.core.errors import ConfigError


class StrictLoader(yaml.SafeLoader):
    """Refuses repeated keys, of which PyYAML would keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ConfigError(key.value, f"is repeated in line {key.start_mark.line + 1}")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml_mapping(path: str) -> dict[str, Any]:
    """Return the file's mapping; keys without a value are left out.

    Raises:
        ConfigError: the file does not exist, is not YAML or not a mapping, or repeats a key; names the file.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), StrictLoader)
    except ConfigError as error:
        raise ConfigError(error.field, f"{error.message} of {path}") from None
    except OSError as error:
        raise ConfigError("--config", f"cannot read {path!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"{path!r} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError("--config", f"{path!r} is not a mapping of flags")
    return {str(name): value for name, value in content.items() if value is not None}
