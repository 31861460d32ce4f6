// The functions of csrc/hopper.cuh that kernels on fibers use. An address of shared memory is an offset into the memory
// of the own block; in another block of the cluster, the rank of that block plus 1 is in the upper 8 bits.
#pragma once

inline unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(static_cast<const char*>(pointer) - current->block->memory);
}

#define __cvta_generic_to_shared shared_address

inline unsigned in_block(unsigned address, int rank) { return address | static_cast<unsigned>(rank + 1) << 24; }

inline char* pointer_of(unsigned address) {
    Block* const block = address >> 24 ? &cluster->blocks[(address >> 24) - 1] : current->block;
    return block->memory + (address & 0xffffff);
}

inline void store_remote(unsigned to, float a, float b, float c, float d) {
    *reinterpret_cast<float4*>(pointer_of(to)) = {a, b, c, d};
}

template <int BYTES>
void copy_on_fibers(unsigned to, const void* from) {
    if (to % BYTES || reinterpret_cast<unsigned long long>(from) % BYTES) __builtin_abort();
    __builtin_memcpy(pointer_of(to), from, BYTES);
}

inline void copy_16_async(unsigned to, const char* from, bool exists) {
    if (to % 16 || (exists && reinterpret_cast<unsigned long long>(from) % 16)) __builtin_abort();
    if (exists)
        __builtin_memcpy(pointer_of(to), from, 16);
    else
        __builtin_memset(pointer_of(to), 0, 16);
}

inline void wait_for_copies() {}

// A barrier in shared memory. Bulk copies complete immediately.
struct Arrivals {
    short needed;          // for the end of a phase
    unsigned short count;  // so far
    int bytes;             // that are expected
};
static_assert(sizeof(Arrivals) == 8);

inline Arrivals& arrivals_at(unsigned barrier) { return *reinterpret_cast<Arrivals*>(pointer_of(barrier)); }
inline void init_barrier(unsigned barrier, int arrivals) { arrivals_at(barrier) = {static_cast<short>(arrivals), 0, 0}; }
inline void fence_barriers() {}

inline void expect_bytes(unsigned barrier, int bytes) {
    ++arrivals_at(barrier).count;
    arrivals_at(barrier).bytes += bytes;
}

inline void store_async(unsigned to, unsigned word, unsigned barrier) {
    *reinterpret_cast<unsigned*>(pointer_of(to)) = word;
    arrivals_at(barrier).bytes -= 4;
}

inline unsigned long long read_once() { return 0; }

inline void copy_bulk_async(unsigned to, const char* from, int bytes, unsigned barrier, unsigned long long) {
    if (to % 16 || bytes % 16 || reinterpret_cast<unsigned long long>(from) % 16) __builtin_abort();
    __builtin_memcpy(pointer_of(to), from, bytes);
    arrivals_at(barrier).bytes -= bytes;
}

inline void wait_phase(unsigned barrier, unsigned phase) {
    const Arrivals& arrivals = arrivals_at(barrier);
    while (arrivals.count < arrivals.needed * static_cast<int>(phase + 1) || arrivals.bytes) yield_fiber();
    if (arrivals.count >= arrivals.needed * static_cast<int>(phase + 2)) __builtin_abort();  // a later phase has ended
}

inline void load_matrices(unsigned (&words)[4], unsigned from) {
    if (from % 16) __builtin_abort();
    const auto lines = operands_of_warp(from);
    const int lane = current->thread % 32;
    for (int matrix = 0; matrix < 4; ++matrix)
        __builtin_memcpy(&words[matrix], pointer_of(lines[matrix * 8 + lane / 4]) + lane % 4 * 4, 4);
}

inline void load_transposed(unsigned (&words)[4], unsigned from) {
    if (from % 16) __builtin_abort();
    const auto lines = operands_of_warp(from);
    const int lane = current->thread % 32;
    for (int matrix = 0; matrix < 4; ++matrix) {
        const auto element = [&](int line) {
            return reinterpret_cast<const unsigned short*>(pointer_of(lines[matrix * 8 + line]))[lane / 4];
        };
        words[matrix] = element(2 * (lane % 4)) | static_cast<unsigned>(element(2 * (lane % 4) + 1)) << 16;
    }
}

inline unsigned transpose_on_fibers(unsigned word) {
    const auto words = operands_of_warp(word);
    const int lane = current->thread % 32;
    const auto element = [&](int line, int column) { return words[line * 4 + column / 2] >> column % 2 * 16 & 0xffff; };
    return element(2 * (lane % 4), lane / 4) | element(2 * (lane % 4) + 1, lane / 4) << 16;
}

inline void sync_cluster() {
    arrive_at_cluster();
    wait_for_cluster();
}
