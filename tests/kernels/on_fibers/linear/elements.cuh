// Replaces csrc/linear/elements.cuh, for bfloat16, and has the products of tensor cores.
#pragma once

#include "hopper.cuh"

static_assert(HALF == 0);

typedef unsigned short Bits;

inline float to_float(Bits bits) { return __int_as_float(static_cast<int>(static_cast<unsigned>(bits) << 16)); }

inline Bits to_bits(float value) {  // to the nearest, ties to even
    unsigned word;
    __builtin_memcpy(&word, &value, sizeof word);
    return static_cast<Bits>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

inline float rounded(float value) { return to_float(to_bits(value)); }
inline void start_next() {}
inline void wait_for_previous() {}

inline float swiglu(float gate, float up) {
    gate = rounded(gate);
    return rounded(gate / (1.0f + expf(-gate))) * rounded(up);
}

inline float half_of(unsigned word, int half) { return to_float(static_cast<Bits>(word >> 16 * half)); }

// a * b + c of two pairs, rounded once.
inline unsigned fma_pairs(unsigned a, unsigned b, unsigned c) {
    unsigned both = 0;
    for (int half = 0; half < 2; ++half)
        both |= static_cast<unsigned>(to_bits(fmaf(half_of(a, half), half_of(b, half), half_of(c, half)))) << 16 * half;
    return both;
}

struct Fragments {
    unsigned a[4], b[2];
};

// The operands of mma.m16n8k16 or m16n8k32: the words with element k of a weight row and of a row of x. A word has
// PER_WORD elements.
template <int PER_WORD>
struct Product {
    static constexpr int kHalf = 4 * PER_WORD;  // elements of four lanes

    Operands<Fragments> all;

    unsigned weights(int row, int k) const {
        return all[row % 8 * 4 + k % kHalf / PER_WORD].a[row / 8 + 2 * (k / kHalf)];
    }
    unsigned x(int column, int k) const { return all[column * 4 + k % kHalf / PER_WORD].b[k / kHalf]; }
};

inline void multiply_on_fibers(float* sums, const unsigned* a, unsigned b0, unsigned b1) {
    const Product<2> product = {operands_of_warp(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}})};
    const int lane = current->thread % 32;
    for (int i = 0; i < 4; ++i) {
        double sum = sums[i];
        for (int k = 0; k < 16; ++k)
            sum += static_cast<double>(half_of(product.weights(lane / 4 + i / 2 * 8, k), k % 2)) *
                   half_of(product.x(2 * (lane % 4) + i % 2, k), k % 2);
        sums[i] = static_cast<float>(sum);
    }
}

// Unsigned weights, signed x.
inline void multiply_bytes_on_fibers(int* sums, const unsigned* a, unsigned b0, unsigned b1) {
    const Product<4> product = {operands_of_warp(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}})};
    const int lane = current->thread % 32;
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 32; ++k)
            sums[i] += static_cast<unsigned char>(product.weights(lane / 4 + i / 2 * 8, k) >> 8 * (k % 4)) *
                       static_cast<signed char>(product.x(2 * (lane % 4) + i % 2, k) >> 8 * (k % 4));
}
