# SPDX-License-Identifier: Apache-2.0
"""What config.json says about AWQ and GPTQ is read as the tools that write it mean it, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.config.coded.awq_config import parse_awq
from fastdeploy.config.coded.gptq_config import GPTQScheme, parse_gptq
from fastdeploy.config.coded.module_rules import ModuleRules
from fastdeploy.config.foreign_formats import read_quantization
from fastdeploy.core.errors import ConfigError

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
Q, LAYER_1 = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("raw", "group_size", "has_zero_points"),
    [
        (AWQ, 128, True),
        ({"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}, 64, True),
        ({"bits": 4, "group_size": -1, "format": "gemm", "zero_point": None, "pack_dtype": "int32"}, -1, True),
        ({**AWQ, "zero_point": False, "modules_to_not_convert": None, "backend": "autoawq"}, 128, False),
        ({"quant_method": "awq"}, 128, True),
    ],
)
def test_awq_is_read(raw: dict[str, Any], group_size: int, has_zero_points: bool) -> None:
    config = parse_awq(raw, "")
    assert (config.group_size, config.has_zero_points) == (group_size, has_zero_points)


@pytest.mark.parametrize(
    ("raw", "is_first_format", "scheme"),
    [
        (GPTQ, True, GPTQScheme(4, 128, True, False)),
        ({**GPTQ, "checkpoint_format": "gptq_v2", "bits": 8}, False, GPTQScheme(8, 128, True, False)),
        ({**GPTQ, "format": "GPTQ_V2", "desc_act": True}, False, GPTQScheme(4, 128, True, True)),
        ({"bits": 4, "group_size": -1}, True, GPTQScheme(4, -1, None, False)),
        ({**GPTQ, "is_marlin_format": False, "rotation": None}, True, GPTQScheme(4, 128, True, False)),
    ],
)
def test_gptq_is_read(raw: dict[str, Any], is_first_format: bool, scheme: GPTQScheme) -> None:
    config = parse_gptq(raw, "")
    assert config.stores_zeros_minus_one == is_first_format
    assert config.scheme_of(Q) == scheme


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"bits": 3}, "bits", "AWQ with 3 bits is not supported"),
        ({"bits": 8}, "bits", "AWQ with 8 bits is not supported"),
        ({"bits": "4"}, "", "bits: f: expected an integer"),
        *(
            ({"version": version}, "version", f"AWQ in the layout '{version.lower()}' is not supported")
            for version in ("gemv", "GEMV_fast", "marlin", "exllama", "ipex")
        ),
        ({"backend": "llm-awq"}, "version", "AWQ in the layout 'llm-awq' is not supported"),
        ({"group_size": 0}, "group_size", "expected -1 or a number of inputs, got 0"),
        ({"group_size": True}, "", "group_size: f: expected an integer"),
        ({"pack_dtype": "int64"}, "pack_dtype", "expected int32, got 'int64'"),
        ({"zero_point": "yes"}, "", "zero_point: f: expected true or false"),
        ({"modules_to_not_convert": "gate"}, "", "modules_to_not_convert: f: expected a list of strings"),
        ({"modules_to_not_convert": ["("]}, "modules_to_not_convert", "is no regular expression"),
        ({"dynamic": {"+:x": {"bits": 2}}}, "dynamic.+:x.bits", "AWQ with 2 bits is not supported"),
    ],
)
def test_awq_that_is_not_supported_is_refused_by_name(changes: dict[str, Any], field: str, message: str) -> None:
    check_refused({**AWQ, **changes}, field, message)


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        *(({"bits": bits}, "bits", f"GPTQ with {bits} bits is not supported") for bits in (2, 3, 6)),
        ({"bits": None}, "bits", "GPTQ without bits is not supported"),
        *(
            ({"checkpoint_format": layout}, "checkpoint_format", f"GPTQ in the layout '{layout}' is not supported")
            for layout in ("marlin", "bitblas", "gptq_p", "exllama")
        ),
        ({"is_marlin_format": True}, "checkpoint_format", "GPTQ in the layout 'marlin' is not supported"),
        ({"rotation": "hadamard"}, "rotation", "GPTQ with rotated weights is not supported"),
        ({"group_size": 0}, "group_size", "expected -1 or a number of inputs, got 0"),
        ({"sym": 1}, "", "sym: f: expected true or false"),
        ({"dynamic": ["x"]}, "", "dynamic: f: expected an object of objects"),
        ({"dynamic": {"*": {}}}, "dynamic", "'*' is no regular expression"),
        ({"dynamic": {r".*\.down_proj": {"bits": 3}}}, r"dynamic..*\.down_proj.bits", "GPTQ with 3 bits"),
    ],
)
def test_gptq_that_is_not_supported_is_refused_by_name(changes: dict[str, Any], field: str, message: str) -> None:
    check_refused({**GPTQ, **changes}, field, message)


def check_refused(raw: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_quantization({"quantization_config": raw}, "f: ")
    error = raised.value
    assert message in str(error) and "f: " in str(error) and "\n" not in str(error)
    assert error.field == ".".join(filter(None, ("quantization_config", field)))


@pytest.mark.parametrize("raw", [AWQ, GPTQ])
def test_the_default_format_is_the_method_of_the_codes(raw: dict[str, Any]) -> None:
    formats = read_quantization({"quantization_config": raw}, "")
    assert formats.name == raw["quant_method"] and formats.own_formats == {raw["quant_method"]}


def test_modules_that_are_not_converted_are_those_of_transformers() -> None:
    rules = ModuleRules(not_converted=("gate", "lm_head", "model.layers.1", r"model.layers.\d+.self_attn.k_proj"))
    names = ("model.layers.0.mlp.gate", "lm_head", LAYER_1, "model.layers.7.self_attn.k_proj")
    assert [rules.plain_by(name) for name in names] == ["modules_to_not_convert"] * 4
    for name in ("model.layers.0.mlp.gate_proj", "model.layers.11.mlp.up_proj", Q):
        assert rules.plain_by(name) is None


def test_the_first_pattern_of_dynamic_that_matches_counts() -> None:
    dynamic = {
        r"-:model\.layers\.0\.": {},
        r"+:.*\.down_proj": {"bits": 8, "group_size": 32},
        r".*": {"sym": False, "desc_act": True},
    }
    config = parse_gptq({**GPTQ, "dynamic": dynamic}, "")
    assert config.rules.plain_by(Q) == "dynamic"
    assert config.rules.plain_by(LAYER_1) is None
    assert config.scheme_of(LAYER_1) == GPTQScheme(8, 32, True, False)
    assert config.scheme_of("lm_head") == GPTQScheme(4, 128, False, True)
    assert parse_awq({**AWQ, "dynamic": {".*up_proj": {"group_size": 32}}}, "").group_size_of("x.up_proj") == 32
