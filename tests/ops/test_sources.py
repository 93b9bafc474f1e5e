# SPDX-License-Identifier: Apache-2.0
"""Rules for native sources that the compiler does not check."""

import re
from pathlib import Path

CUSTOM_OPS = Path(__file__).parent.parent.parent / "custom_ops"
# Headers without functions of external linkage. With any other header, the linker could keep a function compiled for
# AVX-512 that the portable path then calls.
ALLOWED = {"cmath", "cstddef", "cstdint", "cstring", "limits", "type_traits", "utility", "immintrin.h"}


def system_headers(path: Path, seen: set[Path]) -> set[str]:
    """Return the system headers that a source includes, through our own headers too."""
    if path in seen:
        return set()
    seen.add(path)
    text = path.read_text()
    found = set(re.findall(r"#include <([^>]+)>", text))
    for name in re.findall(r'#include "([^"]+)"', text):
        found |= system_headers(CUSTOM_OPS / name, seen)
    return found


def test_sources_compiled_per_path_include_no_functions_that_the_linker_could_share() -> None:
    sources = [path for path in CUSTOM_OPS.rglob("*.cc") if "FD_ISA" in path.read_text()]
    assert len(sources) >= 7
    for path in sources:
        assert system_headers(path, set()) <= ALLOWED, path.name


def test_every_source_starts_with_the_licence_line() -> None:
    sources = [*CUSTOM_OPS.rglob("*.cc"), *CUSTOM_OPS.rglob("*.h")]
    assert [
        path.name for path in sources if not path.read_text().startswith("// SPDX-License-Identifier: Apache-2.0\n")
    ] == []
