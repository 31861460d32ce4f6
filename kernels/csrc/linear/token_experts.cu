// The experts of very few tokens: see few_rows.cuh and moe/token_experts_cuda.py.
//
//     expert_gates    gated[t, j]  =  swiglu(gate_up[experts[t, j]] @ x[t])                         j < PER_TOKEN
//     expert_sums     out[t]       =  sum_j weights[t, j] * down[experts[t, j]] @ gated[t, j]  [+ shared[t]]
//
// The choices of tokens are taken one by one: an expert that two tokens choose is read twice, mostly from the L2 cache.
// This rank has the `experts_here` experts from number `first` on; the others contribute nothing.
//
// Constants besides those of few_rows.cuh: PER_TOKEN; FORMAT of the weights, 0 plain, 1 fp8, 2 int4. OUTPUT_TILES and
// ROW_TILES are 1, and BIAS is 2 if `shared` is added.

#include "linear/few_rows.cuh"

#if FORMAT == 0
#include "linear/plain_format.cuh"
#elif FORMAT == 1
#include "linear/fp8_format.cuh"
#else
#include "linear/int4_format.cuh"
#endif

namespace {

// The choices of all tokens, at most 32: a lane has one.
struct Choices {
    int count, own;
    float own_weight;

    // `weights` may be null.
    __device__ __forceinline__ Choices(
        const long long* experts, const float* weights, long long tokens, long long first, long long experts_here
    ) {
        count = static_cast<int>(tokens) * PER_TOKEN;
        const int place = min(static_cast<int>(threadIdx.x) % 32, count - 1);
        const long long expert = __ldcg(experts + place) - first;
        own = expert >= 0 && expert < experts_here ? static_cast<int>(expert) : -1;
        own_weight = weights == nullptr ? 0.0f : __ldcg(weights + place);
    }

    // Which expert of this rank; -1 if it is one of another rank. Called by whole warps.
    __device__ __forceinline__ int expert(int choice) const { return __shfl_sync(~0u, own, choice); }
    __device__ __forceinline__ float weight(int choice) const { return __shfl_sync(~0u, own_weight, choice); }
};

#if FORMAT == 0
typedef Plain Weights;

__device__ __forceinline__ Weights matrices(const void* values, const void*, const void*, const Shape& shape,
                                            long long, long long, long long) {
    return {static_cast<const Bits*>(values), static_cast<int>(shape.in_size / kColumns)};
}

__device__ __forceinline__ Weights matrix_of(Weights weights, long long expert, long long rows, long long columns) {
    weights.values += expert * rows * columns;
    return weights;
}
#elif FORMAT == 1
typedef BlockScaled Weights;

__device__ __forceinline__ Weights matrices(const void* values, const void* scales, const void*, const Shape& shape,
                                            long long row_group, long long scale_stride, long long scale_step) {
    return {static_cast<const unsigned char*>(values), static_cast<const float*>(scales), row_group, scale_stride,
            scale_step, static_cast<int>(shape.in_size / kBlock)};
}

__device__ __forceinline__ Weights matrix_of(Weights weights, long long expert, long long rows, long long columns) {
    weights.values += expert * rows * columns;
    weights.scales += expert * ((rows + weights.row_group - 1) / weights.row_group) * weights.scale_stride;
    return weights;
}
#else
typedef GroupScaled Weights;

__device__ __forceinline__ Weights matrices(const void* packed, const void* scales, const void* zeros, const Shape&,
                                            long long row_bytes, long long group_stride, long long) {
    return {static_cast<const unsigned char*>(packed), static_cast<const Bits*>(scales),
            static_cast<const Bits*>(zeros), row_bytes, group_stride, static_cast<int>(row_bytes / GROUP)};
}

__device__ __forceinline__ Weights matrix_of(Weights weights, long long expert, long long rows, long long) {
    const long long groups = 2 * weights.steps;
    weights.packed += expert * rows * weights.row_bytes;
    weights.scales += expert * groups * weights.group_stride;
    weights.zeros += expert * groups * weights.group_stride;
    return weights;
}
#endif

// A tile has outputs of one choice. Of n choices, tile `number` is tile number / n of choice number % n.
struct Gates {
    static constexpr int kStageBytes = Weights::kStageBytes;
    typedef Weights::X X;

    Weights all;
    Choices choices;
    int steps;

    __device__ __forceinline__ void copy(char* stage, const Shape& shape, int number, int step, int lane) const {
        const int expert = choices.expert(number % choices.count);
        if (expert < 0) return;
        const Weights own = matrix_of(all, expert, 2 * shape.out_size, shape.in_size);
        own.copy(stage, shape, number / choices.count, step, lane);
    }

    __device__ __forceinline__ void load(X& x, const Shape& shape, int number, int step, int lane) const {
        Shape row = shape;
        row.x += number % choices.count / PER_TOKEN * shape.in_size;
        all.load(x, row, 0, step, lane);
    }

    __device__ __forceinline__ void add(Sums& sums, const char* stage, const X& x, int lane) const {
        all.add(sums, stage, x, lane);
    }
};

// A tile has outputs of one token, and the steps of all its choices: tile `number` is tile number / tokens of token
// number % tokens.
struct WeightedSums {
    static constexpr int kStageBytes = Weights::kStageBytes;
    struct X {
        Weights::X columns;
        float weight;
        bool exists;
    };

    Weights all;
    Choices choices;
    int tokens, steps;

    __device__ __forceinline__ void copy(char* stage, const Shape& shape, int number, int step, int lane) const {
        const int expert = choices.expert(number % tokens * PER_TOKEN + step / all.steps);
        if (expert < 0) return;
        const Weights own = matrix_of(all, expert, shape.out_size, shape.in_size);
        own.copy(stage, shape, number / tokens, step % all.steps, lane);
    }

    __device__ __forceinline__ void load(X& x, const Shape& shape, int number, int step, int lane) const {
        const int choice = number % tokens * PER_TOKEN + step / all.steps;
        x.exists = choices.expert(choice) >= 0;
        x.weight = choices.weight(choice);
        if (!x.exists) return;
        Shape row = shape;
        row.x += choice * shape.in_size;
        all.load(x.columns, row, 0, step % all.steps, lane);
    }

    __device__ __forceinline__ void add(Sums& sums, const char* stage, const X& x, int lane) const {
        if (!x.exists) return;
        Sums parts = {};
        all.add(parts, stage, x.columns, lane);
        add_scaled(sums[0], parts[0], x.weight, x.weight);
    }
};

__device__ __forceinline__ int tiles_of(const Shape& shape) {
    return static_cast<int>((shape.out_size + kOutputs - 1) / kOutputs);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * WARPS) expert_gates(
    const Bits* x, const void* values, const void* scales, const void* zeros, const long long* experts, Bits* gated,
    long long tokens, long long out_size, long long in_size, long long first, long long experts_here,
    long long row_size, long long scale_stride, long long scale_step
) {
    wait_for_previous();  // for the choices
    start_next();         // `expert_sums` reads the choices before this kernel ends
    const Shape shape = {x, 1, out_size, in_size, 1};
    const Weights all = matrices(values, scales, zeros, shape, row_size, scale_stride, scale_step);
    const Gates gates = {all, Choices(experts, nullptr, tokens, first, experts_here), all.steps};
    const int count = gates.choices.count;
    multiply_tiles(gates, shape, tiles_of(shape) * count, [&](int number, const float (&sums)[WARPS][kSums][32]) {
        const int choice = number % count;
        if (gates.choices.expert(choice) >= 0)
            store_tile(gated + choice * out_size, sums, shape, nullptr, number / count);
    });
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) expert_sums(
    const Bits* gated, const void* values, const void* scales, const void* zeros, const long long* experts,
    const float* weights, const Bits* shared, Bits* out, long long tokens, long long out_size, long long in_size,
    long long first, long long experts_here, long long row_size, long long scale_stride, long long scale_step
) {
    start_next();
    const Shape shape = {gated, 1, out_size, in_size, 1};
    const Weights all = matrices(values, scales, zeros, shape, row_size, scale_stride, scale_step);
    const int count = static_cast<int>(tokens);
    const Choices choices(experts, weights, tokens, first, experts_here);
    const WeightedSums weighted = {all, choices, count, PER_TOKEN * all.steps};
    multiply_tiles(weighted, shape, tiles_of(shape) * count, [&](int number, const float (&sums)[WARPS][kSums][32]) {
        const long long before = number % count * out_size;
        store_tile(out + before, sums, shape, shared + before, number / count);
    });
}
