// The experts of very few tokens: see few_rows.cuh and moe/token_experts_cuda.py.
//
//     expert_gates    gated[t, j]  =  swiglu(gate_up[experts[t, j]] @ x[t])                         j < PER_TOKEN
//     expert_sums     out[t]       =  sum_j weights[t, j] * down[experts[t, j]] @ gated[t, j]  [+ shared[t]]
//
// A choice is a token with one of its experts. Choices are computed one by one: if two tokens choose the same expert,
// its weights are read twice, the second time mostly from the L2 cache. This rank has the `experts_here` experts from
// number `first` on; it skips all other experts.
//
// Constants besides those of few_rows.cuh: PER_TOKEN; FORMAT of the weights, 0 plain, 1 fp8, 2 int4. OUTPUT_TILES and
// ROW_TILES are 1, and BIAS is 2 if `shared` is added.

#include "linear/few_rows.cuh"

#if FORMAT == 0
#include "linear/plain_format.cuh"
#elif FORMAT == 1
#include "linear/fp8_format.cuh"
#elif X_ROWS == 4
#include "packed4/byte_format.cuh"
#else
#include "packed4/format.cuh"
#endif

namespace {

// The choices of all tokens, at most 32: each lane has one.
struct Choices {
    Divisor count;
    int own;
    float own_weight;

    // `weights` may be null.
    __device__ __forceinline__ Choices(
        const long long* experts, const float* weights, long long tokens, long long first, long long experts_here
    ) : count(static_cast<int>(tokens) * PER_TOKEN) {
        const int place = min(static_cast<int>(threadIdx.x) % 32, count.value - 1);
        const long long expert = __ldcg(experts + place) - first;
        own = expert >= 0 && expert < experts_here ? static_cast<int>(expert) : -1;
        own_weight = weights == nullptr ? 0.0f : __ldcg(weights + place);
    }

    // The expert of a choice, numbered on this rank; -1 if another rank has it. Called by whole warps.
    __device__ __forceinline__ int expert(int choice) const { return __shfl_sync(~0u, own, choice); }
    __device__ __forceinline__ float weight(int choice) const { return __shfl_sync(~0u, own_weight, choice); }
};

#if FORMAT == 0
typedef Plain Weights;

__device__ __forceinline__ Weights matrices(const void* values, const void*, const void*, const Shape& shape,
                                            long long matrix_rows, long long, long long, long long) {
    return {static_cast<const Bits*>(values), static_cast<unsigned>(matrix_rows * shape.in_size * 2),
            static_cast<int>(shape.in_size / kColumns)};
}
#elif FORMAT == 1
typedef Fp8Matrix Weights;

__device__ __forceinline__ Weights matrices(const void* values, const void* scales, const void*, const Shape& shape,
                                            long long matrix_rows, long long row_group, long long scale_stride,
                                            long long scale_step) {
    const long long row_groups = (matrix_rows + row_group - 1) / row_group;
    return {static_cast<const unsigned char*>(values), static_cast<const float*>(scales), row_group, scale_stride,
            scale_step, static_cast<unsigned>(matrix_rows * shape.in_size),
            static_cast<unsigned>(row_groups * scale_stride), static_cast<int>(shape.in_size / kBlock)};
}
#else
typedef GroupScaled Weights;

__device__ __forceinline__ Weights matrices(const void* packed, const void* scales, const void* zeros, const Shape&,
                                            long long matrix_rows, long long row_bytes, long long group_stride,
                                            long long) {
    const int steps = static_cast<int>(row_bytes / GROUP);
    return {{static_cast<const unsigned char*>(packed), static_cast<const Bits*>(scales),
             static_cast<const Bits*>(zeros), row_bytes, group_stride, static_cast<unsigned>(matrix_rows * row_bytes),
             static_cast<unsigned>(2 * steps * group_stride), steps}};
}
#endif

// A tile has outputs of one choice. With n choices, tile `number` is tile number / n of choice number % n.
struct Gates {
    static constexpr int kStageBytes = Weights::kStageBytes;
    struct Source {
        Weights::Source own;
        bool exists;
    };
    typedef Weights::Inputs Inputs;
    typedef Weights::X X;

    Weights all;
    Choices choices;
    int steps;

    __device__ __forceinline__ Source source(const Shape& shape, int number, int lane) const {
        const int expert = choices.expert(choices.count.rest(number));
        Source found = {all.source(shape, choices.count.quotient(number), lane), expert >= 0};
        found.own.to_expert(all, max(expert, 0));
        return found;
    }

    __device__ __forceinline__ void copy(unsigned stage, const Source& source, int step, int lane) const {
        if (source.exists) all.copy(stage, source.own, step, lane);
    }

    __device__ __forceinline__ Inputs inputs(const Shape& shape, int number, int lane) const {
        Inputs found = all.inputs(shape, 0, lane);
        found.move(choices.count.rest(number) / PER_TOKEN, shape.in_size);
        return found;
    }

    __device__ __forceinline__ void load(X& x, const Inputs& inputs, int step, int lane) const {
        all.load(x, inputs, step, lane);
    }

    __device__ __forceinline__ void add(Sums& sums, const char* stage, const X& x, int lane) const {
        all.add(sums, stage, x, lane);
    }
};

// A tile has outputs of one token, and the steps of all its choices: tile `number` is tile number / tokens of token
// number % tokens.
struct WeightedSums {
    static constexpr int kStageBytes = Weights::kStageBytes;
    struct Source {
        Weights::Source first_expert;
        int first_choice;
    };
    struct Inputs {
        Weights::Inputs first;  // of the first choice of the first token
        int first_choice, columns;
    };
    struct X {
        Weights::X columns;
        float weight;
        bool exists;
    };

    Weights all;
    Choices choices;
    Divisor tokens, steps_of_choice;
    int steps;

    __device__ __forceinline__ WeightedSums(const Weights& all, const Choices& choices, int tokens)
        : all(all), choices(choices), tokens(tokens), steps_of_choice(all.steps), steps(PER_TOKEN * all.steps) {}

    __device__ __forceinline__ Source source(const Shape& shape, int number, int lane) const {
        return {all.source(shape, tokens.quotient(number), lane), tokens.rest(number) * PER_TOKEN};
    }

    __device__ __forceinline__ void copy(unsigned stage, const Source& source, int step, int lane) const {
        const int choice = steps_of_choice.quotient(step);
        const int expert = choices.expert(source.first_choice + choice);
        if (expert < 0) return;
        Weights::Source own = source.first_expert;
        own.to_expert(all, expert);
        all.copy(stage, own, step - choice * all.steps, lane);
    }

    __device__ __forceinline__ Inputs inputs(const Shape& shape, int number, int lane) const {
        return {all.inputs(shape, 0, lane), tokens.rest(number) * PER_TOKEN, static_cast<int>(shape.in_size)};
    }

    __device__ __forceinline__ void load(X& x, const Inputs& inputs, int step, int lane) const {
        const int own = steps_of_choice.quotient(step), choice = inputs.first_choice + own;
        x.exists = choices.expert(choice) >= 0;
        x.weight = choices.weight(choice);
        if (!x.exists) return;
        Weights::Inputs row = inputs.first;
        row.move(choice, inputs.columns);
        all.load(x.columns, row, step - own * all.steps, lane);
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
    const Shape shape(x, 1, out_size, in_size);
    const Weights all = matrices(values, scales, zeros, shape, 2 * out_size, row_size, scale_stride, scale_step);
    const Gates gates = {all, Choices(experts, nullptr, tokens, first, experts_here), all.steps};
    const Divisor& count = gates.choices.count;
    const auto begin = [&] { prepare(all, shape, static_cast<int>(tokens)); };
    const int tiles = tiles_of(shape) * count.value;
    multiply_tiles(gates, shape, tiles, begin, [&](int number, const float (&sums)[WARPS][kSums][32]) {
        const int choice = count.rest(number);
        if (gates.choices.expert(choice) >= 0)
            store_tile(gated + choice * out_size, sums, shape, nullptr, count.quotient(number));
    });
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) expert_sums(
    const Bits* gated, const void* values, const void* scales, const void* zeros, const long long* experts,
    const float* weights, const Bits* shared, Bits* out, long long tokens, long long out_size, long long in_size,
    long long first, long long experts_here, long long row_size, long long scale_stride, long long scale_step
) {
    start_next();
    const Shape shape(gated, 1, out_size, in_size);
    const Weights all = matrices(values, scales, zeros, shape, out_size, row_size, scale_stride, scale_step);
    const Choices choices(experts, weights, tokens, first, experts_here);
    const WeightedSums weighted(all, choices, static_cast<int>(tokens));
    const Divisor& count = weighted.tokens;
    const auto begin = [&] { prepare(all, shape, choices.count.value); };
    const int tiles = tiles_of(shape) * count.value;
    multiply_tiles(weighted, shape, tiles, begin, [&](int number, const float (&sums)[WARPS][kSums][32]) {
        const long long before = count.rest(number) * out_size;
        store_tile(out + before, sums, shape, shared + before, count.quotient(number));
    });
}
