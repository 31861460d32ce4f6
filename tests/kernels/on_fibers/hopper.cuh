// Of csrc/hopper.cuh, what kernels on fibers use. An address of shared memory is a place in it, with the number of the
// block plus 1 in its upper bits if it is another one.
#pragma once

inline unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(static_cast<const char*>(pointer) - current->block->shared());
}

#define __cvta_generic_to_shared shared_address

inline unsigned in_block(unsigned address, int rank) { return address | static_cast<unsigned>(rank + 1) << 24; }

inline char* pointer_of(unsigned address) {
    Block* const block = address >> 24 ? &cluster->blocks[(address >> 24) - 1] : current->block;
    return block->shared() + (address & 0xffffff);
}

inline void store_remote(unsigned to, float a, float b, float c, float d) {
    *reinterpret_cast<float4*>(pointer_of(to)) = {a, b, c, d};
}

template <int BYTES>
void copy_on_fibers(unsigned to, const void* from) {
    if (to % BYTES || reinterpret_cast<unsigned long long>(from) % BYTES) std::abort();
    std::memcpy(pointer_of(to), from, BYTES);
}

inline void copy_16_async(unsigned to, const char* from, bool exists) {
    if (to % 16 || (exists && reinterpret_cast<unsigned long long>(from) % 16)) std::abort();
    if (exists)
        std::memcpy(pointer_of(to), from, 16);
    else
        std::memset(pointer_of(to), 0, 16);
}

inline void wait_for_copies() {}

inline void sync_cluster() {
    arrive_at_cluster();
    wait_for_cluster();
}
