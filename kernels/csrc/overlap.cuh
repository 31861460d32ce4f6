// Programmatic dependent launch (compute capability 9.0 and later): the blocks of a kernel start while the previous
// kernel still runs. A kernel calls wait_for_previous before it reads what earlier kernels write, or writes what they
// read.

#pragma once

// The next kernel may start once every block has called this.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
