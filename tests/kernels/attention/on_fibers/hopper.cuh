// Of csrc/hopper.cuh, what csrc/attention/rope_decode.cu uses. An address of shared memory is a place in it, with the
// number of the block plus 1 in its upper bits if it is another one.
#pragma once

inline unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(static_cast<const char*>(pointer) - current->block->shared());
}

inline unsigned in_block(unsigned address, int rank) { return address | static_cast<unsigned>(rank + 1) << 24; }

inline char* pointer_of(unsigned address) {
    Block* const block = address >> 24 ? &cluster->blocks[(address >> 24) - 1] : current->block;
    return block->shared() + (address & 0xffffff);
}

inline void store_remote(unsigned to, float a, float b, float c, float d) {
    *reinterpret_cast<float4*>(pointer_of(to)) = {a, b, c, d};
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
