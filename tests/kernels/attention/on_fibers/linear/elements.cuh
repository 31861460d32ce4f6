// csrc/linear/elements.cuh for bfloat16, as far as csrc/attention/rope_decode.cu uses it.
#pragma once

static_assert(HALF == 0);

typedef unsigned short Bits;

inline float to_float(Bits bits) { return __int_as_float(static_cast<int>(static_cast<unsigned>(bits) << 16)); }

inline Bits to_bits(float value) {  // to the nearest, ties to even
    unsigned word;
    std::memcpy(&word, &value, sizeof word);
    return static_cast<Bits>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

inline float rounded(float value) { return to_float(to_bits(value)); }
inline void start_next() {}
inline void wait_for_previous() {}

struct Operands {
    unsigned a[2], b[2];
};

inline float half_of(unsigned word, int half) { return to_float(static_cast<Bits>(word >> 16 * half)); }

// Rows 0 to 7 of mma.m16n8k16, whose other rows are zero.
inline void multiply_on_fibers(float (&sums)[4], unsigned first, unsigned second, unsigned b0, unsigned b1) {
    const auto all = operands_of_warp(Operands{{first, second}, {b0, b1}});
    const int lane = current->thread % 32;
    for (int i = 0; i < 2; ++i) {
        const int row = lane / 4, column = 2 * (lane % 4) + i;
        double sum = sums[i];
        for (int k = 0; k < 16; ++k) {
            const unsigned a = all[row * 4 + k % 8 / 2].a[k / 8], b = all[column * 4 + k % 8 / 2].b[k / 8];
            sum += static_cast<double>(half_of(a, k % 2)) * half_of(b, k % 2);
        }
        sums[i] = static_cast<float>(sum);
    }
}

inline void load_transposed_on_fibers(unsigned (&words)[4], const Bits* from) {
    if (reinterpret_cast<unsigned long long>(from) % 16) std::abort();
    const auto lines = operands_of_warp(from);
    const int lane = current->thread % 32;
    for (int matrix = 0; matrix < 4; ++matrix) {
        const Bits low = lines[matrix * 8 + 2 * (lane % 4)][lane / 4];
        const Bits high = lines[matrix * 8 + 2 * (lane % 4) + 1][lane / 4];
        words[matrix] = low | static_cast<unsigned>(high) << 16;
    }
}
