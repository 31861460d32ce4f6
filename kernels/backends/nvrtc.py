"""CUDA kernels from source in `kernels/csrc/`: compiled on first use with NVRTC, launched on torch's current stream.

cuda-core gives access to NVRTC and the driver: the serving host needs no nvcc and no headers. A kernel is compiled once
per process, device and set of constants (about 0.1 s), for the architecture of that device. A launch allocates nothing
and does not wait, so a CUDA graph can capture it. Kernels take only pointers and 64-bit integers, because cuda-core
passes a Python int as 64 bits; a bool would be narrower than what the kernel reads.
"""

import functools
import importlib
import math
import struct
from pathlib import Path
from typing import Any, Literal

import torch

SOURCE_FOLDER = Path(__file__).parents[1] / "csrc"

CudaImpl = Literal["auto", "reference", "cuda"]


def use_cuda(impl: CudaImpl, device: torch.device) -> bool:
    """`auto` is CUDA on CUDA tensors and the reference elsewhere. Raises ValueError if `impl` cannot run there."""
    if impl == "auto":
        return device.type == "cuda"
    if impl not in ("reference", "cuda"):
        raise ValueError(f"impl must be auto, reference or cuda, got {impl!r}")
    if impl == "cuda" and device.type != "cuda":
        raise ValueError(f"impl is cuda, the tensors are on {device}")
    return impl == "cuda"


class CudaKernel:
    """One compiled kernel on one device, made by `load_kernel`."""

    def __init__(self, core: Any, kernel: Any, device: torch.device) -> None:  # Any: cuda-core is an optional package
        self._core = core
        self._kernel = kernel
        self._device = device
        # Programmatic dependent launch, from Hopper on: a kernel may start while the previous one ends.
        self._can_overlap = torch.cuda.get_device_capability(device) >= (9, 0)

    def launch(
        self,
        *args: int,
        blocks: int,
        threads: int,
        shared_bytes: int = 0,
        overlap_previous: bool = False,
    ) -> None:
        """Enqueue on torch's current stream of the kernel's device. Arguments are not checked.

        `overlap_previous` lets the kernel start before the previous one has ended. It is only for kernels that wait
        (`griddepcontrol.wait`) before they touch memory that other kernels of a step write or read. Before the wait, a
        kernel may read what was complete when the previous kernel let it start; csrc/linear/token_experts.cu does this.
        """
        config = self._core.LaunchConfig(
            grid=blocks,
            block=threads,
            shmem_size=shared_bytes,
            programmatic_stream_serialization=overlap_previous and self._can_overlap,
        )
        with torch.cuda.device(self._device):
            stream = self._core.Stream.from_handle(torch.cuda.current_stream().cuda_stream)
            self._core.launch(stream, config, self._kernel, *args)


@functools.cache
def load_kernel(
    source: str,
    name: str,
    device: torch.device,
    constants: tuple[tuple[str, int], ...] = (),
    shared_bytes: int = 0,
    *,
    only_here: bool = False,
) -> CudaKernel:
    """Kernel `name` of `kernels/csrc/<source>`, with `constants` as macros and up to `shared_bytes` of dynamic memory.

    `device` has an index. `only_here` allows instructions that later architectures may lack (sm_90a: wgmma). Raises
    RuntimeError if cuda-core is missing or, with the compiler's log, if compilation fails.
    """
    core, driver = cuda_packages()
    major, minor = torch.cuda.get_device_capability(device)
    options = core.ProgramOptions(
        name=source,
        arch=f"sm_{major}{minor}{'a' if only_here else ''}",
        std="c++17",
        include_path=str(SOURCE_FOLDER),
        define_macro=[(macro, str(value)) for macro, value in constants],
    )
    code = (SOURCE_FOLDER / source).read_text(encoding="utf-8")
    with torch.cuda.device(device):
        core.Device(device.index).set_current()
        kernel = core.Program(code, code_type="c++", options=options).compile("cubin").get_kernel(name)
        if shared_bytes:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel.handle, device.index)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"{name} cannot have {shared_bytes} bytes of shared memory on {device}: {status!r}")
    return CudaKernel(core, kernel, device)


def device_address(tensor: torch.Tensor) -> int:
    """The tensor's address for kernels: its own on the GPU, the device alias of pinned host memory.

    Raises ValueError for host memory that is not pinned.
    """
    if tensor.device.type == "cuda":
        return tensor.data_ptr()
    _, driver = cuda_packages()
    status, address = driver.cuMemHostGetDevicePointer(tensor.data_ptr(), 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(f"a tensor on {tensor.device} is not pinned, so the GPU cannot reach it: {status!r}")
    return int(address)


def float_bits(number: float) -> int:
    """The bits of a float32, as an argument."""
    (bits,) = struct.unpack("<i", struct.pack("<f", number))
    return int(bits)


def log2_scale_bits(scale: float) -> int:
    """The factor of scores before exp2, scale * log2(e), as an argument of attention kernels."""
    return float_bits(scale / math.log(2))


def cuda_packages() -> tuple[Any, Any]:
    """The modules cuda.core and cuda.bindings.driver. Raises RuntimeError where they are missing."""
    try:
        core, driver = importlib.import_module("cuda.core"), importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise RuntimeError(
            f"CUDA kernels are compiled with cuda-core, which is not complete here ({error}): "
            "install pdserve with the extra cuda12 or cuda13, or the package cuda-core[cu13] itself"
        ) from error
    return core, driver
