# SPDX-License-Identifier: Apache-2.0
"""Completes the configuration of speculation by the files of its drafting model, once these are here."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from fastdeploy.config.drafting_checkpoint import infer_method_of, number_of_drafts
from fastdeploy.config.row_head_config import ROW_HEAD_METHODS
from fastdeploy.config.speculative_config import (
    FIELD,
    MAX_DRAFTS,
    AnyOtherModel,
    MTPConfig,
    UnknownMethodConfig,
)
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.errors import ConfigError


def complete_by_files(config: AnyOtherModel, folder: Path) -> AnyOtherModel | MTPConfig:
    """Return the configuration with the method and the number of drafts that the files in a folder say.

    Args:
        config: a method that was given is compared with the files, and a number of drafts that was given is kept.

    Raises:
        ConfigError: the method is another one than the files are for, or it is not available; names both.
    """
    method = infer_method_of(folder)
    if isinstance(config, UnknownMethodConfig):
        completed = parse_speculative_config({**config.given, "method": method})
        if isinstance(completed, MTPConfig):
            return completed
        assert isinstance(completed, AnyOtherModel), "the files are a drafting model's"
        config = completed
    elif method != config.method:
        raise ConfigError(
            f"{FIELD}.method", f"{config.method!r} was given, but the files of {config.model} are for {method!r}"
        )
    count = number_of_drafts(folder, config.method)
    if count is None:
        return config
    if config.has_default_k:
        return config.with_drafts(min(count, MAX_DRAFTS))
    return cut_passes(config, count) if config.method in ROW_HEAD_METHODS else config


def cut_passes(config: AnyOtherModel, limit: int) -> AnyOtherModel:
    """Return the configuration of a head that makes at most `limit` drafts; an extension may still add to them."""
    if config.num_model_steps <= limit:
        return config
    return config.with_drafts(limit) if config.extension is None else replace(config, num_model_steps=limit)
