# SPDX-License-Identifier: Apache-2.0
"""vLLM's names of quantization methods are accepted where the files agree, and refused with one line where not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import FORMATS, OWN_FORMATS, QuantizationConfig
from fastdeploy.core.errors import ConfigError

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
VLLM = {name: name for name in ("awq", "gptq", "compressed-tensors", "fp8")} | {
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "AWQ": "awq",
}


@pytest.mark.parametrize(("name", "format"), VLLM.items())
def test_a_name_of_vllm_means_the_codes_of_the_files(name: str, format: str) -> None:
    assert QuantizationConfig.from_value(name) == QuantizationConfig.from_value(format)
    assert QuantizationConfig.from_value({"mlp": name}).mlp == format
    assert QuantizationConfig.from_value(name).own_formats == {format}


@pytest.mark.parametrize("name", VLLM)
@pytest.mark.parametrize("folder", ["qwen3", "fp8/qwen3"])
def test_it_is_refused_with_one_line_if_the_files_have_no_such_codes(folder: str, name: str) -> None:
    config = ModelConfig.from_pretrained(GOLDEN / folder)
    if (folder, name) == ("fp8/qwen3", "fp8"):
        assert config.weight_formats(QuantizationConfig.from_value(name)).is_none
        return
    with pytest.raises(ConfigError) as caught:
        config.weight_formats(QuantizationConfig.from_value(name))
    problem = f"{VLLM[name]}: {GOLDEN / folder} has no weights that are quantized so"
    assert str(caught.value) == f"quantization: {problem}; expected one of {', '.join(FORMATS)}"


def test_parts_may_ask_for_widened_codes_beside_other_formats() -> None:
    config = ModelConfig.from_pretrained(GOLDEN / "fp8" / "glm4_moe")
    wanted = QuantizationConfig.from_value({"attention": "fp8", "experts": "w4a8", "head": "wint8"})
    found = config.weight_formats(wanted)
    assert (found.attention, found.mlp, found.experts, found.head) == ("none", "none", "w4a8", "wint8")


def test_formats_for_codes_that_are_kept_stay() -> None:
    wanted = QuantizationConfig.from_value("awq")
    assert wanted.for_codes("awq", are_widened=False, name="x") == wanted
    assert wanted.for_codes("awq", are_widened=True, name="x") == QuantizationConfig.from_value("none")
    assert set(OWN_FORMATS) == {"gguf", "awq", "gptq", "compressed-tensors", "fp8"}
