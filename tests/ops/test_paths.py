# SPDX-License-Identifier: Apache-2.0
"""Every instruction-set path passes the same tests, and results do not depend on the number of threads."""

from pathlib import Path

import pytest

from fastdeploy.ops.backends.cpu import library
from tests.ops.isa_paths import PATHS, run, supported

HERE = Path(__file__).parent
SUITES = ["test_examples.py", "test_row_independence.py", "test_attention_independence.py", "test_quantized_rows.py"]
SUITES += ["test_block_maxima.py", "test_quant_definition.py", "test_experts_independence.py", "test_embedding.py"]
SUITES += ["test_latent_attention.py", "test_head_products.py"]
SUITES += ["test_packing.py::test_packed_files_fit_the_layout_that_the_backend_names"]
DIGEST = """
import hashlib
from fastdeploy.ops.backends.cpu import library
from tests.ops.bits import bits
from tests.ops.test_examples import CASES, registry
NAMES = "linear rms_norm append_attention append_latent_attention route experts_up experts_down project_heads".split()
state = hashlib.sha256()
for name, index in CASES:
    if name in NAMES:
        for tensor in registry.entries()[name].examples[index](registry.lookup("cpu")):
            state.update(bits(tensor).tobytes())
print("digest", library.isa(), library.num_threads(), state.hexdigest())
"""


# All cases on the path of most other processors, and the first ones of each test on the rest.
@pytest.mark.parametrize(
    ("path", "cases"),
    [
        *((path, "not nightly" if path == "avx2" else "quick") for path in PATHS),
        *(pytest.param(path, "not nightly", marks=pytest.mark.nightly) for path in PATHS if path != "avx2"),
    ],
)
def test_the_operator_tests_pass_on(path: str, cases: str) -> None:
    if path == library.isa():
        pytest.skip("this process runs the same tests on this path")
    if path not in supported():
        pytest.skip(f"this processor has no {path}")
    pytest_command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", cases]
    done = run([*pytest_command, *(str(HERE / suite) for suite in SUITES)], FD_CPU_ISA=path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    lines = []
    for threads in ("1", "2", "5", "70"):  # 70 threads share 64 ranges of tiles
        done = run(["-c", DIGEST], FD_NUM_THREADS=threads)
        line = next(line.split() for line in done.stdout.splitlines() if line.startswith("digest"))
        assert line[2] == threads
        lines.append(line[3])
    assert len(set(lines)) == 1


def test_fd_cpu_isa_selects_the_path() -> None:
    digests = {}  # paths with fused multiply-add may agree, because AMD's bf16 dot product rounds like two of them
    for path in supported():
        done = run(["-c", DIGEST], FD_CPU_ISA=path)
        line = next(line.split() for line in done.stdout.splitlines() if line.startswith("digest"))
        assert line[1] == path
        digests[path] = line[3]
    assert len(set(digests.values())) >= min(2, len(digests)), "the portable path has no fused multiply-add"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"FD_CPU_ISA": "sse9"}, "FD_CPU_ISA: expected avx512_bf16, avx512, avx2 or portable, got 'sse9'"),
        ({"FD_NUM_THREADS": "none"}, "FD_NUM_THREADS: expected 1..1024, got 'none'"),
        ({"FD_NUM_THREADS": "0"}, "FD_NUM_THREADS: expected 1..1024, got '0'"),
    ],
)
def test_an_invalid_setting_is_an_error(settings: dict[str, str], message: str) -> None:
    done = run(["-c", "from fastdeploy.ops.registry import select_backend; select_backend('cpu')"], **settings)
    assert done.returncode != 0
    assert f"OperatorLibraryError: {message}" in done.stderr
