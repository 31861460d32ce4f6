"""csrc/collectives/all_reduce.cu itself, compiled for the CPU: its ranks, blocks and threads are threads of a process.

PTX is replaced by equivalent C++; all other code is that of the kernel. Ranks run concurrently, so this finds reads and
writes of shared buffers that are too early.
"""

import functools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.kernels.backends.nvrtc import SOURCE_FOLDER

COMPILER = shutil.which("g++")
SOURCES = Path(__file__).parent / "on_threads"
SIZES = {"MAX_BLOCKS": 4, "THREADS": 4, "HALF_BYTES": 2048}
KERNELS = {
    "one_shot": ("all_reduce", {"ELEMENT": 0, "TWO_SHOT": 0}),
    "two_shot": ("all_reduce", {"ELEMENT": 0, "TWO_SHOT": 1}),
    "gather": ("gather_shares", {"UNIT_BYTES": 2}),
}
PTX = {
    'asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");': (
        "__atomic_store_n(flag, value, __ATOMIC_RELEASE);"
    ),
    'asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");': (
        "value = __atomic_load_n(flag, __ATOMIC_ACQUIRE);"
    ),
    'asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));': "time = clock_ns();",
    'asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(vector.shorts[at]) : "f"(value));': (
        "vector.shorts[at] = round_to_bfloat16(value);"
    ),
}

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def command(**constants: object) -> list[str]:
    defined = [f"-D{name}={value}" for name, value in (SIZES | constants).items()]
    return [str(COMPILER), "-std=c++20", "-O1", "-pthread", f"-I{SOURCES}", f"-I{SOURCE_FOLDER}", *defined]


@pytest.fixture(scope="module")
def compiled_main(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """main.cc for this many ranks."""

    @functools.cache
    def compiled(ranks: int) -> Path:
        path = tmp_path_factory.mktemp("main") / "main.o"
        subprocess.run([*command(RANKS=ranks), "-c", str(SOURCES / "main.cc"), "-o", str(path)], check=True)
        return path

    return compiled


def compile_ranks(folder: Path, main: Path, ranks: int, **changes: str) -> Path:
    """A program of main.o and, for each rank, a kernel of each kind, with `changes` made to its source."""
    code = (SOURCE_FOLDER / "collectives" / "all_reduce.cu").read_text(encoding="utf-8")
    for old, new in (*PTX.items(), *changes.items()):
        assert old in code, old
        code = code.replace(old, new)
    kernels = folder / "all_reduce.cc"
    kernels.write_text(f'#include "cuda_on_threads.h"\n{code}')
    objects = [main]
    for rank in range(ranks):
        for kind, (kernel, more) in KERNELS.items():
            objects.append(folder / f"{kind}_{rank}.o")
            options = command(RANKS=ranks, RANK=rank, **more, **{kernel: f"{kind}_{rank}"})
            subprocess.run([*options, "-c", str(kernels), "-o", str(objects[-1])], check=True)
    program = folder / "ranks"
    subprocess.run([*command(), *map(str, objects), "-o", str(program)], check=True)
    return program


def run(program: Path, *arguments: str) -> list[str]:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_calls_give_the_right_results(tmp_path: Path, compiled_main: Callable[[int], Path], ranks: int) -> None:
    program = compile_ranks(tmp_path, compiled_main(ranks), ranks)
    assert run(program) == ["wrong 0"] + ["calls 250 missing -1 at 0"] * ranks
    wrong, *reports = run(program, "100")  # the last rank stops; the others end their calls without it
    assert wrong == "wrong 0"
    assert reports == [f"calls 250 missing {ranks - 1} at 101"] * (ranks - 1) + ["calls 100 missing -1 at 0"]


def test_memory_that_is_overwritten_too_early_is_detected(tmp_path: Path, compiled_main: Callable[[int], Path]) -> None:
    program = compile_ranks(tmp_path, compiled_main(2), 2, **{"(call & 1) * HALF_BYTES": "0"})
    wrong, *_ = run(program)
    assert int(wrong.removeprefix("wrong ")) > 0
