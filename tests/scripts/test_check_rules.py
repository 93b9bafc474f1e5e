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
        "a.py:1: adaptive length has 451 lines; the maximum is 450",
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout at the limits of the rules, without a violation."""
    adaptive = tmp_path / "fastdeploy" / "spec_decode" / "adaptive"
    for folder in (adaptive, tmp_path / "fastdeploy" / "core", tmp_path / "docs"):
        folder.mkdir(parents=True)
    (adaptive / "a.py").write_text(LICENCE + "x = 1\n" * 51)
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


@pytest.mark.parametrize("name", check_rules.RETIRED_IDENTIFIERS)
def test_a_retired_identifier_is_found_as_a_whole_word_only(checkout: Path, name: str) -> None:
    source = checkout / "custom_ops" / "a.cc"
    source.parent.mkdir()
    source.write_text(f"// SPDX-License-Identifier: Apache-2.0\nx = {name}s + my{name};\n")
    assert check_rules.find_violations(checkout) == []
    source.write_text(f"// SPDX-License-Identifier: Apache-2.0\nx->{name}(1);\n")
    assert check_rules.find_violations(checkout) == [f"custom_ops/a.cc:2: uses the retired identifier '{name}'"]
