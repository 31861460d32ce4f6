// Hopper's asynchronous instructions as functions: copies, barriers, clusters, warpgroup matrix products.
// Addresses of shared memory are 32 bits wide, as in PTX.
//
// Constants: HALF, 1 for float16 elements and 0 for bfloat16.

#pragma once

#include "overlap.cuh"

#if HALF
#define ELEMENT "f16"
#else
#define ELEMENT "bf16"
#endif

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// The same address in another block of this cluster.
__device__ __forceinline__ unsigned in_block(unsigned address, int rank) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Barrier of the cluster: afterwards, all threads see what the others have written.
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Named barrier of THREADS threads; 0 is the barrier of __syncthreads.
template <int BARRIER, int THREADS>
__device__ __forceinline__ void sync_threads() {
    asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}

// Arrive at the barrier without waiting.
template <int BARRIER, int THREADS>
__device__ __forceinline__ void arrive_threads() {
    asm volatile("bar.arrive %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Barriers in shared memory (mbarrier). When all arrivals are counted, the phase ends and the next one begins.

__device__ __forceinline__ void init_barrier(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Call it after the last init_barrier, before other threads use the barriers.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Wait for the end of phase number `phase`, counted from 0. That phase or the next one must be the current one.
__device__ __forceinline__ void wait_phase(unsigned barrier, unsigned phase) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "again:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra again;\n\t}" ::"r"(barrier),
        "r"(phase % 2)
        : "memory");
}

// Copies 16 bytes from global to shared memory, or writes zeros.
__device__ __forceinline__ void copy_16_async(unsigned to, const char* from, bool exists) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
}

// This thread arrives at the barrier when its copies so far are done.
__device__ __forceinline__ void arrive_after_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier, and adds `bytes` to the bytes that must be copied before its phase ends.
__device__ __forceinline__ void expect_bytes(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Copies from global to shared memory; both addresses and the size are multiples of 16. The barrier counts the bytes.
__device__ __forceinline__ void copy_bulk_async(unsigned to, const char* from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// L2 cache policy for data that is read once: its lines are evicted first.
__device__ __forceinline__ unsigned long long read_once() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void copy_bulk_async(
    unsigned to, const char* from, int bytes, unsigned barrier, unsigned long long policy
) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void store_remote(unsigned to, float a, float b, float c, float d) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}

// Stores a word to another block of the cluster; `barrier`, in that block, counts the 4 bytes. Unlike a barrier of the
// cluster, this does not wait for earlier stores to global memory.
__device__ __forceinline__ void store_async(unsigned to, unsigned word, unsigned barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(word),
                 "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ float2 load_remote(unsigned from) {
    float2 pair;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(from) : "memory");
    return pair;
}

// Makes the writes of threads and cp.async to shared memory visible to warpgroup products.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Loads four 8 x 8 matrices of 16-bit elements; lane l has the address of line l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(unsigned (&words)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
}

// The same, with each matrix transposed.
__device__ __forceinline__ void load_transposed(unsigned (&words)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void store_matrices(unsigned to, const unsigned (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

__device__ __forceinline__ unsigned round_pair(float low, float high) {
    unsigned word;
    asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Operands of matrix products in shared memory, as descriptors; adding n to one moves it by 16 * n bytes.
//
// A tile consists of lines of 128 bytes, and is aligned to 1024. The 16-byte words of a line are swizzled: word w of
// line l is at w ^ l % 8. The elements along a line are the K dimension of the product. In a transposed operand they
// are its N dimension: a tile has 64 of these columns, and the next 64 are `next_tile` bytes further.
__device__ __forceinline__ unsigned word_in_tile(int line, int word) { return line * 128 + ((word ^ (line & 7)) << 4); }

__device__ __forceinline__ unsigned long long tile_operand(unsigned address, unsigned next_tile = 16) {
    return (address & 0x3ffff) >> 4 | static_cast<unsigned long long>(next_tile >> 4) << 16 | 1024ull >> 4 << 32 |
           1ull << 62;
}

// An operand stored as columns of 16-byte words, 64 lines each: word w of line l is at 1024 * w + 16 * l.
__device__ __forceinline__ unsigned long long column_operand(unsigned address) {
    return (address & 0x3ffff) >> 4 | 1024ull >> 4 << 16 | 128ull >> 4 << 32;
}

// Products run after begin_products and commit_products, until finish_products; `sums` must not be used meanwhile.
// Thread t of the warpgroup has sums[i] of row 16 * (t / 32) + t % 32 / 4 + 8 * (i % 4 / 2) and column
// i / 4 * 8 + t % 4 * 2 + i % 2.

template <int N>
__device__ __forceinline__ void hold(float (&sums)[N]) {  // the compiler moves nothing across this
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Makes this thread's registers visible to products.
__device__ __forceinline__ void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void begin_products(float (&sums)[N]) {
    hold(sums);
    fence_registers();
}

// The products issued so far may start.
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until only the products committed last are still running.
__device__ __forceinline__ void wait_for_first_products() {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

template <int N>
__device__ __forceinline__ void finish_products(float (&sums)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    hold(sums);
}

#define SUMS_4(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define SUMS_16(s, i) SUMS_4(s, i), SUMS_4(s, i + 4), SUMS_4(s, i + 8), SUMS_4(s, i + 12)
#define SUMS_64(s, i) SUMS_16(s, i), SUMS_16(s, i + 16), SUMS_16(s, i + 32), SUMS_16(s, i + 48)
#define LIST_32                                                                     \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "        \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_64                                                                          \
    LIST_32                                                                              \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_128                                                                                   \
    LIST_32                                                                                        \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "           \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// sums [64, 64] = (add ? sums : 0) + a [64, 16] * b [64, 16]^T; `a` in registers, as load_matrices leaves it.
__device__ __forceinline__ void multiply_64x64(float (&sums)[32], const unsigned (&a)[4], unsigned long long b,
                                               bool add) {
    asm volatile(
        "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %37, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" LIST_32
        "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n\t}"
        : SUMS_16(sums, 0), SUMS_16(sums, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// sums [64, 64] += a [64, 16] * b [64, 16]^T
__device__ __forceinline__ void multiply_64x64(float (&sums)[32], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" LIST_32
                 "}, %32, %33, 1, 1, 1, 0, 0;"
                 : SUMS_16(sums, 0), SUMS_16(sums, 16)
                 : "l"(a), "l"(b));
}

// sums [64, 128] = (add ? sums : 0) + a [64, 16] * b [128, 16]^T
__device__ __forceinline__ void multiply_64x128(float (&sums)[64], unsigned long long a, unsigned long long b,
                                                bool add) {
    asm volatile(
        "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %66, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " {" LIST_64
        "}, %64, %65, add, 1, 1, 0, 0;\n\t}"
        : SUMS_64(sums, 0)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// sums [64, 128] += a [64, 16] * b [16, 128]; `a` in registers, as load_matrices leaves it.
__device__ __forceinline__ void multiply_64x128(float (&sums)[64], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " {" LIST_64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : SUMS_64(sums, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// sums [64, 256] += a [64, 16] * b [16, 256]
__device__ __forceinline__ void multiply_64x256(float (&sums)[128], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." ELEMENT "." ELEMENT " {" LIST_128
                 "}, %128, %129, 1, 1, 1, 0, 1;"
                 : SUMS_64(sums, 0), SUMS_64(sums, 64)
                 : "l"(a), "l"(b));
}
