// One warp copies one row of ROW_BYTES bytes: the widest words that both addresses allow, then the tail byte by byte.
// Either side may be pinned host memory. Up to eight loads per lane are in flight before the first store.

template <typename Word>
__device__ __forceinline__ void copy_words(char* to, const char* from, int lane) {
    constexpr int WORDS = ROW_BYTES / sizeof(Word);
    constexpr int PASSES = (WORDS + 31) / 32;
    constexpr int IN_FLIGHT = PASSES < 1 ? 1 : PASSES < 8 ? PASSES : 8;
    for (int first = lane; first < WORDS; first += 32 * IN_FLIGHT) {
        Word words[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (first + 32 * i < WORDS) words[i] = __ldcs(reinterpret_cast<const Word*>(from) + first + 32 * i);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (first + 32 * i < WORDS) __stcg(reinterpret_cast<Word*>(to) + first + 32 * i, words[i]);
    }
    const int tail = WORDS * sizeof(Word) + lane;
    if (tail < ROW_BYTES) to[tail] = from[tail];
}

__device__ __forceinline__ void copy_row(char* to, const char* from, int lane) {
    const unsigned misaligned = static_cast<unsigned>(reinterpret_cast<unsigned long long>(to)) |
                                static_cast<unsigned>(reinterpret_cast<unsigned long long>(from));
    if (misaligned % 16 == 0)
        copy_words<uint4>(to, from, lane);
    else if (misaligned % 8 == 0)
        copy_words<uint2>(to, from, lane);
    else if (misaligned % 4 == 0)
        copy_words<unsigned>(to, from, lane);
    else
        copy_words<char>(to, from, lane);
}
