"""CUDA kernels, compiled for the CPU: the threads of a cluster are fibers of one thread.

Headers are replaced by those of the same name in on_fibers/, and PTX by equivalent C++. All other code is that of the
kernel. Asynchronous copies complete immediately, so a missing wait for a copy is not found.
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
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
""": "multiply_on_fibers(sums, a, b0, b1);",
    """    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
""": "multiply_bytes_on_fibers(sums, a, b0, b1);",
    """        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
""": "copy_on_fibers<16>(to, from);",
    """        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
""": "copy_on_fibers<BYTES>(to, from);",
    """    unsigned long long address = __cvta_generic_to_global(pointer);
    asm volatile("" : "+l"(address));
    return static_cast<T*>(__cvta_global_to_generic(address));
""": "return pointer;",
    """    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(both) : "r"(values), "r"(kOffset >> 8), "n"(FIRST ? 0x4342 : 0x4140));
    asm("fma.rn." ELEMENT "x2 %0, %0, %1, %2;" : "+r"(both) : "r"(kOne), "r"(negated));
""": "both = fma_pairs(__byte_perm(values, kOffset >> 8, FIRST ? 0x4342 : 0x4140), kOne, negated);",
    """    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(both) : "r"(values), "n"(FIRST ? 0x3424 : 0x1404));
""": "both = __byte_perm(values, 0, FIRST ? 0x3424 : 0x1404);",
    """    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(both) : "r"(0x7b807b80u), "r"(0x80008000u));
""": "both = fma_pairs(both, 0x7b807b80u, 0x80008000u);",
    """        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }"
            : "=r"(both) : "r"(two));
""": "both = __byte_perm(two, 0, 0x1010);",
    """        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }"
            : "=r"(both) : "r"(two));
""": "both = __byte_perm(two, 0, 0x3232);",
    """    asm("fma.rn." ELEMENT "x2 %0, %0, %1, %2;" : "+r"(both) : "r"(scale), "r"(0x80008000u));
""": "both = fma_pairs(both, scale, 0x80008000u);",
    """    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(bytes));
""": "",
    'asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");': "",
    """    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
""": "transposed = transpose_on_fibers(word);",
    'asm volatile("barrier.cluster.arrive.relaxed.aligned;");': "arrive_at_cluster();",
    'asm volatile("barrier.cluster.wait.aligned;");': "wait_for_cluster();",
    'asm volatile("barrier.cluster.wait.aligned;" ::: "memory");': "wait_for_cluster();",
    'asm volatile("cp.async.commit_group;" ::: "memory");': "",
    r'asm volatile("cp.async.commit_group;\n\tcp.async.wait_group 1;" ::: "memory");': "",
    'asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to_softmax), "f"(top), "f"(total) : "memory");': (
        "*reinterpret_cast<float2*>(pointer_of(to_softmax)) = {top, total};"
    ),
    "extern __shared__ __align__(16) char memory[];": "char* const memory = current->block->memory;",
    "extern __shared__ __align__(128) char memory[];": "char* const memory = current->block->memory;",
    "extern __shared__ __align__(16) char rings[];": "char* const rings = current->block->memory;",
}
_MAIN = """
template <int... NUMBERS>
struct Numbers {};

template <int COUNT, int... NUMBERS>
struct Below : Below<COUNT - 1, COUNT - 1, NUMBERS...> {};

template <int... NUMBERS>
struct Below<0, NUMBERS...> : Numbers<NUMBERS...> {};

template <typename... Types, int... NUMBERS>
void call(void (*kernel)(Types...), const long long* arguments, Numbers<NUMBERS...>) {
    kernel((Types)arguments[NUMBERS]...);
}

template <typename... Types>
void call(void (*kernel)(Types...), const long long* arguments) {
    call(kernel, arguments, Below<sizeof...(Types)>());
}

extern "C" bool run(const long long* arguments, int blocks, int shared_bytes) {
    return run_clusters(blocks / kClusterBlocks, shared_bytes, [&] { call(KERNEL, arguments); });
}
"""


class FiberKernels:
    """`load` replaces `load_kernel`: it compiles kernels into a folder, with `changes` made to their source."""

    def __init__(self, folder: Path, changes: dict[str, str] | None = None, *, cluster: int = 1) -> None:
        self._folder = folder
        self._changes = changes or {}
        self._cluster = cluster

    def load(
        self, source: str, name: str, _device: torch.device, constants: tuple[tuple[str, int], ...], _bytes: int
    ) -> "FiberKernel":
        sources = self._folder / "sources"
        if not sources.exists():
            _write_sources(sources, self._changes)
        threads = 32 * dict(constants).get("WARPS", 8)
        sizes = (("CLUSTER_BLOCKS", self._cluster), ("BLOCK_THREADS", threads), ("KERNEL", name))
        key = abs(hash((constants, name)))
        path, library = self._folder / f"kernel_{key:x}.cc", self._folder / f"kernel_{key:x}.so"
        if library.exists():
            return FiberKernel(ctypes.CDLL(str(library)), threads)
        path.write_text(f'#include "cuda_on_fibers.h"\n#include "{source}"\n{_MAIN}')
        defined = [f"-D{macro}={value}" for macro, value in (*constants, *sizes)]
        options = ["-std=c++17", "-Og", "-ffp-contract=off", "-w", "-shared", "-fPIC", f"-I{sources}", *defined]
        options.append("-U_FORTIFY_SOURCE")  # some compilers define it, and it forbids longjmp between stacks
        libraries = ["-nostdlib", "-lm", "-lc", "-lgcc"]  # no libstdc++: linking it takes a quarter of the time
        subprocess.run([str(COMPILER), *options, str(path), "-o", str(library), *libraries], check=True)
        return FiberKernel(ctypes.CDLL(str(library)), threads)


def _write_sources(folder: Path, changes: dict[str, str]) -> None:
    """Write all sources to `folder`, with `changes` made and PTX replaced."""
    shutil.copytree(SOURCE_FOLDER, folder)
    shutil.copytree(_SOURCES, folder, dirs_exist_ok=True)
    missing = set(changes)
    for path in folder.rglob("*.cu*"):
        code = path.read_text(encoding="utf-8")
        for old, new in changes.items():
            if old in code:
                missing.discard(old)
                code = code.replace(old, new)
        for old, new in _PTX.items():
            code = code.replace(old, new + "\n" * old.endswith("\n"))
        path.write_text(code, encoding="utf-8")
    assert not missing, missing


class FiberKernel:
    """A compiled kernel, with the interface of `CudaKernel`."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._threads = threads

    def launch(
        self, *args: int, blocks: int, threads: int, shared_bytes: int = 0, overlap_previous: bool = False
    ) -> None:
        assert threads == self._threads
        assert overlap_previous
        self._library.run.restype = ctypes.c_bool
        within = self._library.run((ctypes.c_longlong * len(args))(*args), blocks, shared_bytes)
        assert within, f"the kernel wrote beyond its {shared_bytes} bytes of shared memory"
