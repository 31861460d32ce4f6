// Causal attention over all rows of 512 + 64 elements; see kernels/mla/dense_mla.py for the formula.
//
// A thread block processes one piece of a tile's keys (kernels/mla/tile_plan.py) and 64 of the tile's query rows:
// heads of one query or, with fewer than 64 heads, of several queries; see latent_attention.cuh. The blocks of a piece
// are adjacent, so that a row of the cache is read from memory only once. A tile of several pieces stores partial
// results.
//
// Constants: HEADS, TILE_TOKENS, PAGE_SIZE, HALF (see hopper.cuh).

#include "mla/latent_attention.cuh"

namespace {

constexpr int kTileRows = TILE_TOKENS * HEADS;
constexpr int kRowBlocks = (kTileRows + kHeads - 1) / kHeads;

struct Piece {  // a column of TilePlan.pieces
    int first_page, token, tokens, visible, start, end, partial;

    __device__ Piece(const int* field, long long stride)
        : first_page(field[0]),
          token(field[stride]),
          tokens(field[2 * stride]),
          visible(field[3 * stride]),
          start(field[4 * stride]),
          end(field[5 * stride]),
          partial(field[6 * stride]) {}
};

struct Keys {  // of a piece
    const int* page_ids;
    int start, count;
    int seen[2];  // how many of them the two query rows of this thread see

    __device__ int operator[](int i) const {
        const int key = start + i;
        return i < count ? page_ids[key / PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE : -1;
    }
    __device__ __forceinline__ void mask(int block, float (&scores)[32]) const {
        if ((block + 1) * kBlockRows <= min(seen[0], seen[1])) return;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int key = block * kBlockRows + i / 4 * 8 + lane() % 4 * 2 + i % 2;
            if (key >= seen[i % 4 / 2]) scores[i] = -__int_as_float(0x7f800000);
        }
    }
};

// Scales the sums of an adder and stores those of the first `lines` query rows.
__device__ __forceinline__ void finish(Shared& shared, int half, int lines, float (&sums)[128], char* out,
                                       float* partial) {
    float factor[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float sum = shared.totals()[first_head() + 8 * row].y;
        factor[row] = sum > 0.0f ? 1.0f / sum : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 128; ++i) sums[i] *= factor[i % 4 / 2];
    if (partial == nullptr) {
        unsigned char* const staging = shared.stages[0] + (half * 4 + warp_in_group()) * 128 * 128;
        store<128>(sums, staging, out + 16 * warp_in_group() * 1024 + half * 512, lines - 16 * warp_in_group());
        return;
    }
#pragma unroll
    for (int i = 0; i < 128; i += 2) {
        const int row = first_head() + 8 * (i % 4 / 2), column = half * 256 + i / 4 * 8 + lane() % 4 * 2;
        if (row < lines) {
            *reinterpret_cast<float2*>(partial + row * 512 + column) = make_float2(sums[i], sums[i + 1]);
        }
    }
}

}  // namespace

// query [T, HEADS, 576], out [T, HEADS, 512]; kRowBlocks blocks of kThreads for every piece.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
dense_mla(const char* query, const char* pages, long long page_bytes, long long slot_bytes, const int* page_ids,
          const int* pieces, long long pieces_stride, long long scale_bits, char* out, float* partials, float* log_sums) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();
    start_next();
    wait_for_previous();

    const Piece piece(pieces + blockIdx.x / kRowBlocks, pieces_stride);
    const int first_row = blockIdx.x % kRowBlocks * kHeads;
    const int lines = min(piece.tokens * HEADS - first_row, kHeads);
    if (lines <= 0) return;
    const long long query_row = static_cast<long long>(piece.token) * HEADS + first_row;
    const long long slot = static_cast<long long>(piece.partial) * kTileRows + first_row;
    Keys keys = {page_ids + piece.first_page, piece.start, piece.end - piece.start, {0, 0}};
    const int blocks = (keys.count + kBlockRows - 1) / kBlockRows;
    if (threadIdx.x < 128) {
        take_registers<kScorerRegisters>();
        fetch_query(shared, query + query_row * kTiles * 128, kTiles * 128, lines);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int token = (first_row + first_head() + 8 * row) / HEADS;
            keys.seen[row] = min(piece.visible + token - piece.start, keys.count);
        }
        wait_for_copies();
        fence_async();
        sync_threads<kScorer, 128>();
        unsigned in_registers[kRegisterSteps][4];
        read_query(shared, in_registers);
        score(shared, keys, blocks, in_registers, __int_as_float(static_cast<int>(scale_bits)));
        __syncthreads();
        const int line = thread_in_group();
        if (piece.partial >= 0 && line < lines) {
            const float2 total = shared.totals()[line];
            log_sums[slot + line] = total.x + log2f(total.y);  // -inf if the row sees no key
        }
    } else {
        give_registers<kAdderRegisters>();
        const int half = threadIdx.x / 128 - 1;
        const Pages all_pages = {pages, page_bytes, slot_bytes};
        if (blocks > 0) fetch(shared, keys, all_pages, 0, 0);
        if (blocks > 1) fetch(shared, keys, all_pages, 1, 1);
        wait_phase(shared_address(&shared.query_read), 0);
        if (blocks > kQueryStage) fetch(shared, keys, all_pages, kQueryStage, kQueryStage);
        float sums[128];
#pragma unroll
        for (int i = 0; i < 128; ++i) sums[i] = 0.0f;
        add(shared, keys, all_pages, blocks, half, sums);
        wait_for_copies();
        __syncthreads();
        finish(shared, half, lines, sums, out + query_row * 1024, piece.partial < 0 ? nullptr : partials + slot * 512);
    }
}
