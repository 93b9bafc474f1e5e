# SPDX-License-Identifier: Apache-2.0
"""Check what linters do not: sizes, licence lines, retired identifiers, what GPU kernels may use, and paragraphs and
links of documents.

    python scripts/check_rules.py [ROOT]

Prints one line per violation, `file:line: what is wrong`, and exits with status 1 if there is any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAGRAPH_WORDS = 90
MAX_ADAPTIVE_LINES = 610
ADAPTIVE_LENGTH = ("fastdeploy/spec_decode/adaptive/*.py", "fastdeploy/worker/step_timing.py")
VOCABULARY_FOLDERS = ("fastdeploy", "custom_ops", "tests", "benchmarks")
SOURCE_FOLDERS = (*VOCABULARY_FOLDERS, "scripts")
LICENCE = "SPDX-License-Identifier: Apache-2.0"
RETIRED_IDENTIFIERS = (
    *("_goes", "judge_drafts", "_write_rules", "RowRules", "_Known", "_grown", "hides_first", "wants_drafts", "STAKE"),
    *("REPAYMENTS", "START_ALONE", "Survival", "MAX_PAUSE_S", "_goes_on", "_Place", "_with_what_drafts"),
    *("takes_turns", "draw_and_ask", "take_rows", "_Measured", "Routine", "class Gate"),
)
RETIRED = re.compile(rf"\b(?:{'|'.join(RETIRED_IDENTIFIERS)})\b")
KERNEL_LAYER = ("device.h", "device_cuda.h", "runtime.cu")  # what kernels stand on; only it names CUDA
TILES = "tiles.h"
MATH = (
    *("exp", "exp2", "exp10", "expm1", "log", "log2", "log10", "log1p", "pow", "sqrt", "rsqrt", "cbrt", "hypot", "sin"),
    *("cos", "tan", "sincos", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "erf", "erfc", "tgamma"),
    *("lgamma", "fmod", "remainder", "fma", "fabs", "fmin", "fmax", "floor", "ceil", "trunc", "round", "rint"),
    *("nearbyint", "lrint", "llrint", "lround", "llround", "ldexp", "frexp", "modf", "scalbn", "copysign"),
)
_MATH_CALL = rf"(?<![\w.>:])(?:std::|::)?(?:__builtin_)?(?:{'|'.join(MATH)})[fl]?\s*\("
KERNEL_RULES = {  # what kernels must not contain -> why
    r"\basm\b": "is PTX; device.h has what kernels may use",
    r"<<<": "launches without launch(...)",
    r"__shared__": "declares shared memory; shared_memory<T>() is as large as the launch says",
    r"\b(?:__builtin_)?mem(?:cpy|set|move|cmp)\b": "touches memory unseen by the emulator; use bit_cast or load16",
    _MATH_CALL: "calls a math library, whose bits differ between processors",
    r"\b__(?!builtin_|shared__)\w+": "is for one compiler only; device.h has what kernels may use",
    r"\b(?:atomic[A-Z]|cuda[A-Z]|threadIdx|blockIdx|blockDim|gridDim)\w*": "is CUDA's; device.h has its counterpart",
}
TILE_FUNCTIONS = r"\b(?:copy_async\w*|load_matrix_x4\w*|mma_\w+)\s*[(<]"
Violation = tuple[Path, int, str]


def find_files(root: Path, folders: tuple[str, ...], *suffixes: str) -> list[Path]:
    """Return the files of these folders that end in one of the suffixes, sorted."""
    found = [path for folder in folders for path in (root / folder).rglob("*") if path.suffix in suffixes]
    return sorted(path for path in found if path.is_file())


def find_sources(root: Path, *suffixes: str) -> list[Path]:
    """Return the sources that end in one of the suffixes, setup.py included."""
    return [*sorted(root.glob("setup.py")), *find_files(root, SOURCE_FOLDERS, *suffixes)]


def check_files(root: Path) -> Iterator[Violation]:
    """Yield sources that are too long or lack the licence line; empty files need none."""
    for path in find_sources(root, ".py", ".cc", ".cu", ".h", ".sh"):
        lines = path.read_text().splitlines()
        if lines and not any(LICENCE in line for line in lines[:2]):
            yield path, 1, f"has no licence line ({LICENCE})"
        if path.suffix != ".sh" and len(lines) > MAX_FILE_LINES:
            yield path, len(lines), f"has {len(lines)} lines; the maximum is {MAX_FILE_LINES}"


def check_vocabulary(root: Path) -> Iterator[Violation]:
    """Yield uses of retired identifiers."""
    for path in find_files(root, VOCABULARY_FOLDERS, ".py", ".cc", ".cu", ".h"):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            for name in RETIRED.findall(line):
                yield path, number, f"uses the retired identifier '{name}'"


def check_functions(root: Path) -> Iterator[Violation]:
    """Yield Python functions that are too long."""
    for path in find_sources(root, ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    yield path, node.lineno, f"{node.name} has {length} lines; the maximum is {MAX_FUNCTION_LINES}"


def code_lines(text: str) -> list[str]:
    """Return the lines of C++ without comments, and with empty texts in quotes."""
    tokens = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    replaced = re.sub(tokens, lambda m: '""' if m[0][0] == '"' else "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    return [line for line in replaced.split("\n")]


def check_kernels(root: Path) -> Iterator[Violation]:
    """Yield what GPU kernels contain besides the functions of device.h."""
    for path in find_files(root, ("custom_ops/gpu_ops",), ".cu", ".h"):
        if path.name in KERNEL_LAYER:
            continue
        rules = {**KERNEL_RULES, **({} if path.name == TILES else {TILE_FUNCTIONS: f"is for {TILES} only"})}
        for number, line in enumerate(code_lines(path.read_text()), start=1):
            for pattern, what in rules.items():
                if found := re.search(pattern, line):
                    yield path, number, f"'{found[0].strip()}' {what}"


def check_adaptive_length(root: Path) -> Iterator[Violation]:
    """Yield a violation if adaptive length, including the timing of steps, outgrows its limit."""
    files = [path for pattern in ADAPTIVE_LENGTH for path in sorted(root.glob(pattern))]
    total = sum(len(path.read_text().splitlines()) for path in files)
    if total > MAX_ADAPTIVE_LINES:
        yield files[0], 1, f"adaptive length has {total} lines; the maximum is {MAX_ADAPTIVE_LINES}"


def find_documents(root: Path) -> list[Path]:
    """Return the project's documents."""
    return [*sorted(root.glob("*.md")), *find_files(root, ("docs", "benchmarks"), ".md")]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line of a document; lines of code blocks are empty."""
    in_code = False
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        is_fence = line.lstrip().startswith("```")
        in_code ^= is_fence
        yield number, "" if in_code or is_fence else line


def check_paragraphs(root: Path) -> Iterator[Violation]:
    """Yield paragraphs and list items with too many words; tables do not count."""
    for path in find_documents(root):
        start, words = 1, 0
        for number, line in [*prose(path), (0, "")]:
            text = line.strip()
            starts_item = re.match(r"[-*] |\d+\. ", text) is not None
            if not text or starts_item or text.startswith(("|", "#")):
                if words > MAX_PARAGRAPH_WORDS:
                    yield path, start, f"the paragraph has {words} words; the maximum is {MAX_PARAGRAPH_WORDS}"
                words = 0
            if not text.startswith(("|", "#")):
                start = start if words else number
                words += len(text.split())


def heading_anchors(path: Path) -> set[str]:
    """Return the anchors that a document's headings get on the web."""
    headings = [line.lstrip("#").strip().lower() for _, line in prose(path) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def check_links(root: Path) -> Iterator[Violation]:
    """Yield links of documents to files or headings that do not exist."""
    for path in find_documents(root):
        for number, line in prose(path):
            for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
                if re.match(r"[a-z]+:", target):
                    continue
                name, _, anchor = target.partition("#")
                linked = path.parent / name if name else path
                if not linked.exists():
                    yield path, number, f"links to {target}, which does not exist"
                elif anchor and anchor not in heading_anchors(linked):
                    yield path, number, f"links to {target}, which has no such heading"


CHECKS = (
    *(check_files, check_vocabulary, check_functions, check_kernels, check_adaptive_length, check_paragraphs),
    check_links,
)


def find_violations(root: Path) -> list[str]:
    """Return one line per violation in the checkout at `root`."""
    return [f"{path.relative_to(root)}:{line}: {what}" for check in CHECKS for path, line, what in check(root)]


def main() -> int:
    """Print the violations of the checkout named on the command line, or of this one; return the exit status."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    violations = find_violations(root)
    print(*violations, sep="\n", end="\n" if violations else "")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
