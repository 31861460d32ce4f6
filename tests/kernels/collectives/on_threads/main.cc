// Runs random calls of csrc/all_reduce.cu on RANKS ranks of MAX_BLOCKS blocks of THREADS threads, all of them threads of
// this process, and compares every result. Ranks are delayed at random. With an argument, the last rank stops after that
// many calls, and the others must time out. Prints the number of wrong elements, and what each rank has reported.

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cuda_on_threads.h"

struct Block {
    explicit Block(int threads) : barrier(threads) {}
    std::barrier<> barrier;
    std::atomic<bool> all{true};
};

thread_local Index threadIdx, blockIdx, gridDim;
thread_local Block* block;

void __syncthreads() { block->barrier.arrive_and_wait(); }

bool __syncthreads_and(bool value) {
    if (!value) block->all = false;
    __syncthreads();
    const bool result = block->all;
    __syncthreads();
    if (threadIdx.x == 0) block->all = true;
    __syncthreads();
    return result;
}

// Longer than asked for: threads that wait leave the cores to others.
void __nanosleep(unsigned) { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

unsigned long long clock_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

typedef void Sum(char*, long long, char* const*, char*, char*);
typedef void Gather(const char*, long long, long long, char*, long long, long long, long long, char* const*, char*,
                    char*);
#define RANK_KERNELS(rank) extern "C" Sum one_shot_##rank, two_shot_##rank; extern "C" Gather gather_##rank;
RANK_KERNELS(0) RANK_KERNELS(1)
#if RANKS == 4
RANK_KERNELS(2) RANK_KERNELS(3)
Sum* const sums[2][4] = {{one_shot_0, one_shot_1, one_shot_2, one_shot_3},
                         {two_shot_0, two_shot_1, two_shot_2, two_shot_3}};
Gather* const gathers[4] = {gather_0, gather_1, gather_2, gather_3};
#else
Sum* const sums[2][2] = {{one_shot_0, one_shot_1}, {two_shot_0, two_shot_1}};
Gather* const gathers[2] = {gather_0, gather_1};
#endif

constexpr int kCalls = 250, kGatheredRows = 3;
constexpr unsigned short kUntouched = 0x7777;

struct Call {
    int kind;  // 0 one shot, 1 two shots, 2 gather
    int size;  // elements of the sum, or of a gathered row
    int blocks, root;
    int count() const { return kind == 2 ? kGatheredRows * size : size; }
};

struct State {
    unsigned long long calls[MAX_BLOCKS], timeout_ns, failed;
};

struct Rank {
    alignas(16) char memory[8 * MAX_BLOCKS * RANKS + 2 * HALF_BYTES] = {};
    alignas(16) char tensor[HALF_BYTES + 16];
    alignas(16) char gathered[RANKS * HALF_BYTES];
    State state = {};
    unsigned long long report[2] = {};
    std::barrier<> barrier{MAX_BLOCKS * THREADS};
    std::vector<std::unique_ptr<Block>> blocks;
};

unsigned short value_of(int rank, int call, int at) {
    unsigned hash = rank * 7919u + call * 104729u + at * 2654435761u;
    hash = (hash ^ hash >> 13) * 0x5bd1e995u;
    hash ^= hash >> 15;
    return round_to_bfloat16((static_cast<int>(hash % 2001) - 1000) / static_cast<float>(1 + (hash >> 20) % 97));
}

float as_float(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }

long wrong_elements(const Rank& own, const Call& call, int number, int rank) {
    long wrong = 0;
    const auto* tensor = reinterpret_cast<const unsigned short*>(own.tensor);
    const auto* gathered = reinterpret_cast<const unsigned short*>(own.gathered);
    for (int at = 0; call.kind < 2 && at < call.size; ++at) {
        float sum = as_float(value_of(0, number, at));
        for (int other = 1; other < RANKS; ++other) sum += as_float(value_of(other, number, at));
        wrong += tensor[at] != round_to_bfloat16(sum);
    }
    for (int at = 0; call.kind == 2 && rank == call.root && at < call.count() * RANKS; ++at) {
        const int row = at / (RANKS * call.size), column = at % (RANKS * call.size);
        wrong += gathered[at] != value_of(column / call.size, number, row * call.size + column % call.size);
    }
    return wrong + (tensor[call.count()] != kUntouched);
}

int main(int argc, char** argv) {
    const int stops_after = argc > 1 ? std::atoi(argv[1]) : kCalls;
    std::mt19937 random(1);
    std::vector<Call> calls;
    for (int number = 0; number < kCalls; ++number) {
        Call call{static_cast<int>(random() % 3), 0, 0, static_cast<int>(random() % RANKS)};
        call.size = 1 + random() % (call.kind == 2 ? 40 : HALF_BYTES / 2);
        const int vectors = (call.size * 2 + 15) / 16;
        const int items = call.kind == 2 ? call.count() : call.kind == 1 ? (vectors + RANKS - 1) / RANKS : vectors;
        call.blocks = std::min((items + THREADS - 1) / THREADS, MAX_BLOCKS);
        calls.push_back(call);
    }
    static std::array<Rank, RANKS> ranks;
    std::array<char*, RANKS> memory;
    for (int rank = 0; rank < RANKS; ++rank) {
        memory[rank] = ranks[rank].memory;
        ranks[rank].state.timeout_ns = argc > 1 ? 2'000'000'000 : 60'000'000'000;
        for (int number = 0; number < MAX_BLOCKS; ++number)
            ranks[rank].blocks.push_back(std::make_unique<Block>(THREADS));
    }
    std::atomic<long> wrong{0};
    auto run = [&](int rank, int block_number, int thread) {
        Rank& own = ranks[rank];
        threadIdx = {thread}, blockIdx = {block_number}, block = own.blocks[block_number].get();
        const bool first = block_number == 0 && thread == 0;
        char* state = reinterpret_cast<char*>(&own.state);
        char* report = reinterpret_cast<char*>(own.report);
        for (int number = 0; number < (rank + 1 == RANKS ? stops_after : kCalls); ++number) {
            const Call& call = calls[number];
            gridDim = {call.blocks};
            if (first) {
                auto* tensor = reinterpret_cast<unsigned short*>(own.tensor);
                for (int at = 0; at < call.count(); ++at) tensor[at] = value_of(rank, number, at);
                tensor[call.count()] = kUntouched;
                if ((number * 31 + rank) % 17 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
            }
            own.barrier.arrive_and_wait();  // a kernel starts when all before it have ended
            if (block_number < call.blocks && call.kind < 2) {
                sums[call.kind][rank](own.tensor, call.size * 2, memory.data(), state, report);
            } else if (block_number < call.blocks) {
                gathers[rank](own.tensor, kGatheredRows, call.size, own.gathered, RANKS * call.size, 0,
                              rank == call.root ? RANKS : 0, memory.data(), state, report);
            }
            own.barrier.arrive_and_wait();
            if (first && own.report[0] == 0) wrong += wrong_elements(own, call, number, rank);
        }
    };
    std::vector<std::thread> threads;
    for (int rank = 0; rank < RANKS; ++rank)
        for (int number = 0; number < MAX_BLOCKS; ++number)
            for (int thread = 0; thread < THREADS; ++thread) threads.emplace_back(run, rank, number, thread);
    for (std::thread& thread : threads) thread.join();
    std::printf("wrong %ld\n", wrong.load());
    for (const Rank& rank : ranks)
        std::printf("calls %llu missing %lld at %llu\n", rank.state.calls[0], static_cast<long long>(rank.report[0]) - 1,
                    rank.report[1]);
}
