# SPDX-License-Identifier: Apache-2.0
"""Reads the chat template of a server's configuration, and finds out at the start what its own templates print."""

from __future__ import annotations

import logging
from pathlib import Path

from fastdeploy.core.errors import ConfigError, InvalidRequestError, TemplateLimitError
from fastdeploy.core.json_types import shorten
from fastdeploy.detokenize.chat_template import ChatTemplates
from fastdeploy.detokenize.template_probes import TemplateTraits
from fastdeploy.detokenize.template_process import TemplateProcess
from fastdeploy.detokenize.template_renderer import check_template

logger = logging.getLogger("fastdeploy.server")


def own_traits(templates: ChatTemplates, chat_template: str | None) -> TemplateTraits | None:
    """Probe the server's template and those of its tokenizer; return what the one for tools prints, if there is one.

    They are probed in a process with limits, because they come with the checkpoint.

    Raises:
        ConfigError: a template exceeds a limit.
    """
    own = [*templates.templates.items(), *([] if chat_template is None else [("--chat-template", chat_template)])]
    if not own:
        return None
    process = TemplateProcess()
    try:
        for name, template in own:
            _probe(templates, name, template, process)
        return templates.traits(templates.select(chat_template, has_tools=True), process)
    except InvalidRequestError:  # this one cannot be compiled, or there is only one of another name
        return None
    finally:
        process.close()


def _probe(templates: ChatTemplates, name: str, template: str, process: TemplateProcess) -> None:
    """Probe a template; one that cannot be compiled is an error of the requests that need it."""
    try:
        templates.traits(template, process)
    except TemplateLimitError as error:
        raise ConfigError("chat_template", f"{shorten(name)} cannot be used: {error.message}") from None
    except InvalidRequestError as error:
        logger.warning("the chat template %s cannot be used: %s", shorten(name), error.message)


def read_chat_template(given: str) -> str | None:
    """Return the template's source from the flag's value, which is the source itself or a file."""
    if not given:
        return None
    try:
        source = given if "{" in given else Path(given).read_text(encoding="utf-8")
        check_template(source)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--chat-template", f"cannot read {given!r}: {error}") from None
    except InvalidRequestError as error:
        raise ConfigError("--chat-template", error.message) from None
    return source
