"""csrc/attention/rope_decode.cu, compiled for the CPU: the threads of a cluster are fibers of one thread.

PTX is replaced by what it does, and some functions of included headers by those in on_fibers/; everything else is the
kernel. Copies are never late, and memory has no delays.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

from pdserve.kernels.backends.nvrtc import SOURCE_FOLDER

COMPILER = shutil.which("g++")
_SOURCES = Path(__file__).parent / "on_fibers"
_PTX = {
    """    asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
        ".f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%7, %8}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(first), "r"(second), "r"(0), "r"(b0), "r"(b1));
""": "multiply_on_fibers(sums, first, second, b0, b1);",
    """    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(from))
                 : "memory");
""": "load_transposed_on_fibers(words, from);",
    'asm volatile("barrier.cluster.arrive.relaxed.aligned;");': "arrive_at_cluster();",
    'asm volatile("barrier.cluster.wait.aligned;");': "wait_for_cluster();",
    'asm volatile("barrier.cluster.wait.aligned;" ::: "memory");': "wait_for_cluster();",
    'asm volatile("cp.async.commit_group;" ::: "memory");': "",
    r'asm volatile("cp.async.commit_group;\n\tcp.async.wait_group 1;" ::: "memory");': "",
    'asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to_softmax), "f"(top), "f"(total) : "memory");': (
        "*reinterpret_cast<float2*>(pointer_of(to_softmax)) = {top, total};"
    ),
    "extern __shared__ __align__(16) char memory[];": "char* const memory = current->block->shared();",
}
_MAIN = """
template <typename... Types, std::size_t... Numbers>
void call(void (*kernel)(Types...), const long long* arguments, std::index_sequence<Numbers...>) {
    kernel((Types)arguments[Numbers]...);
}

template <typename... Types>
void call(void (*kernel)(Types...), const long long* arguments) {
    call(kernel, arguments, std::index_sequence_for<Types...>());
}

extern "C" void run(const long long* arguments, int blocks, int shared_bytes) {
    run_clusters(blocks / kClusterBlocks, shared_bytes, [&] { call(rope_decode, arguments); });
}
"""


class FiberKernels:
    """Compiles kernels into a folder, in place of `load_kernel`; `changes` are made to their source."""

    def __init__(self, folder: Path, changes: dict[str, str] | None = None) -> None:
        self._folder = folder
        self._changes = changes or {}

    def load(
        self, source: str, _name: str, _device: torch.device, constants: tuple[tuple[str, int], ...], _bytes: int
    ) -> "FiberKernel":
        code = (SOURCE_FOLDER / source).read_text(encoding="utf-8")
        for old, new in (_PTX | self._changes).items():
            assert old in code, old
            code = code.replace(old, new)
        assert "asm" not in code
        path, library = self._folder / "kernel.cc", self._folder / f"kernel_{hash(constants):x}.so"
        path.write_text(f'#include <utility>\n#include "cuda_on_fibers.h"\n{code}{_MAIN}')
        defined = [f"-D{macro}={value}" for macro, value in constants]
        options = ["-std=c++20", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", f"-I{_SOURCES}", *defined]
        subprocess.run([str(COMPILER), *options, str(path), "-o", str(library)], check=True)
        return FiberKernel(ctypes.CDLL(str(library)))


class FiberKernel:
    """A compiled kernel, with the interface of `CudaKernel`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def launch(
        self, *args: int, blocks: int, threads: int, shared_bytes: int = 0, overlap_previous: bool = False
    ) -> None:
        assert threads == 256
        assert overlap_previous
        self._library.run((ctypes.c_longlong * len(args))(*args), blocks, shared_bytes)
