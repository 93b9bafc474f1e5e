# SPDX-License-Identifier: Apache-2.0
"""scripts/check_rules.py reports every kind of violation with its file and line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_rules.py"
spec = importlib.util.spec_from_file_location("check_rules", SCRIPT)
assert spec and spec.loader
check_rules = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_rules)

LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"
RETIRED = "Row" + "Rules"  # in two parts, because the check reads this file too
PLANTED = {
    "no licence": ("core/a.py", "x = 1\n", "a.py:1: has no licence line"),
    "long file": ("core/a.py", LICENCE + "x = 1\n" * 400, "a.py:401: has 401 lines; the maximum is 400"),
    "long function": (
        "core/a.py",
        LICENCE + "class A:\n    def f(self):\n" + "        x = 1\n" * 60,
        "a.py:3: f has 61 lines; the maximum is 60",
    ),
    "retired identifier": (
        "core/a.py",
        LICENCE + f"x = {RETIRED}()\n",
        f"a.py:2: uses the retired identifier '{RETIRED}'",
    ),
    "adaptive length": (
        "spec_decode/adaptive/b.py",
        LICENCE + "x = 1\n" * 398,
        "a.py:1: adaptive length has 611 lines; the maximum is 610",
    ),
    "long paragraph": (
        "../docs/a.md",
        "# A\n\n" + "word " * 45 + "\n" + "word " * 46,
        "a.md:3: the paragraph has 91 words",
    ),
    "dead link": ("../docs/a.md", "# A\n\nSee [b](b.md).\n", "a.md:3: links to b.md, which does not exist"),
    "dead anchor": (
        "../docs/a.md",
        "# A part\n\n[A](#a-part) [B](#b)\n",
        "a.md:3: links to #b, which has no such heading",
    ),
}
KERNEL = "// SPDX-License-Identifier: Apache-2.0\n// exp(x), asm and <<<\n"
PLANTED_IN_KERNELS = {
    "PTX": ('asm volatile("fence;");', "'asm' is PTX"),
    "launch": ("kernel<<<1, 32>>>(a);", "'<<<' launches without launch"),
    "shared memory": ("__shared__ float sums[32];", "'__shared__' declares shared memory"),
    "memcpy": ("std::memcpy(&a, &b, 4);", "'memcpy' touches memory unseen"),
    "builtin memset": ("__builtin_memset(a, 0, 4);", "'__builtin_memset' touches memory unseen"),
    "libm": ("float y = expf(x);", "'expf(' calls a math library"),
    "std": ("float y = std::log2(x);", "'std::log2(' calls a math library"),
    "builtin of libm": ("float y = __builtin_fmaf(a, b, c);", "'__builtin_fmaf(' calls a math library"),
    "intrinsic": ("float y = __fdividef(a, b);", "'__fdividef' is for one compiler only"),
    "two texts": ("#ifdef __CUDACC__", "'__CUDACC__' is for one compiler only"),
    "atomic": ("atomicAdd(a, 1);", "'atomicAdd' is CUDA's"),
    "index": ("int i = threadIdx.x;", "'threadIdx' is CUDA's"),
    "asynchronous copy": ("copy_async_wait<1>();", "'copy_async_wait<' is for tiles.h only"),
    "matrix": ("load_matrix_x4_transposed(a);", "'load_matrix_x4_transposed(' is for tiles.h only"),
    "product": ("mma_s8(c, a, b);", "'mma_s8(' is for tiles.h only"),
}
ALLOWED_IN_KERNELS = (
    "float y = fd::exp2(x) + lanes.log(x) + exp_nonpositive(x);",
    "int n = __builtin_popcount(bits); /* memcpy(a, b) */",
    'const char* what = "memset() \\" <<<";',
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout at the limits of the rules, without a violation."""
    adaptive = tmp_path / "fastdeploy" / "spec_decode" / "adaptive"
    for folder in (adaptive, tmp_path / "fastdeploy" / "core", tmp_path / "docs"):
        folder.mkdir(parents=True)
    (adaptive / "a.py").write_text(LICENCE + "x = 1\n" * 211)
    (tmp_path / "fastdeploy" / "core" / "__init__.py").write_text("")
    (tmp_path / "docs" / "index.md").write_text(
        "# Index\n\n- " + "word " * 89 + "\n- " + "word " * 89 + "\n\n```\n[code](no-link.md)\n```\n[top](#index)\n"
    )
    return tmp_path


def test_a_checkout_within_the_limits_has_no_violation(checkout: Path) -> None:
    assert check_rules.find_violations(checkout) == []


@pytest.mark.parametrize(("name", "text", "expected"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_is_reported(checkout: Path, name: str, text: str, expected: str) -> None:
    (checkout / "fastdeploy" / name).resolve().write_text(text)
    (found,) = check_rules.find_violations(checkout)
    assert expected in found


def plant(checkout: Path, name: str, text: str) -> list[str]:
    """Write a source of GPU kernels; return the violations."""
    source = checkout / "custom_ops" / "gpu_ops" / name
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(KERNEL + text + "\n")
    return check_rules.find_violations(checkout)


@pytest.mark.parametrize(("text", "expected"), PLANTED_IN_KERNELS.values(), ids=PLANTED_IN_KERNELS)
def test_what_a_kernel_may_not_use_is_reported_in_sources_and_headers(checkout: Path, text: str, expected: str) -> None:
    for name in ("norm.cu", "norm.h"):
        (found,) = plant(checkout, name, text)
        assert f"gpu_ops/{name}:3: {expected}" in found
        (checkout / "custom_ops" / "gpu_ops" / name).unlink()
    assert plant(checkout, "device_cuda.h", text) == [], "the layer below kernels may use everything"


@pytest.mark.parametrize("text", ALLOWED_IN_KERNELS)
def test_what_only_looks_like_it_is_allowed_in_a_kernel(checkout: Path, text: str) -> None:
    assert plant(checkout, "norm.cu", text) == []


def test_only_the_header_of_tiles_copies_and_multiplies_them(checkout: Path) -> None:
    assert plant(checkout, "tiles.h", "copy_async16(to, from);\nload_matrix_x4(to);\nmma_bf16(c, a, b);") == []


def test_a_kernel_needs_a_licence_and_has_a_length(checkout: Path) -> None:
    (found,) = plant(checkout, "norm.cu", "int a;\n" * 398)
    assert "norm.cu:401: has 401 lines" in found
    (checkout / "custom_ops" / "gpu_ops" / "norm.cu").write_text("int a;\n")
    (found,) = check_rules.find_violations(checkout)
    assert "norm.cu:1: has no licence line" in found


@pytest.mark.parametrize("name", check_rules.RETIRED_IDENTIFIERS)
def test_a_retired_identifier_is_found_as_a_whole_word_only(checkout: Path, name: str) -> None:
    source = checkout / "custom_ops" / "a.cc"
    source.parent.mkdir()
    source.write_text(f"// SPDX-License-Identifier: Apache-2.0\nx = {name}s + my{name};\n")
    assert check_rules.find_violations(checkout) == []
    source.write_text(f"// SPDX-License-Identifier: Apache-2.0\nx->{name}(1);\n")
    assert check_rules.find_violations(checkout) == [f"custom_ops/a.cc:2: uses the retired identifier '{name}'"]
