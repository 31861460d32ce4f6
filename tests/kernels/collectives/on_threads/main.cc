// Runs random calls of csrc/collectives/all_reduce.cu on RANKS ranks of MAX_BLOCKS blocks of THREADS threads, all of
// them threads of this process, and checks every result. Some calls of a rank are delayed. With an argument, the last
// rank stops after that many calls, and the others must time out. Prints the number of wrong elements, and reports of
// all ranks.
//
// Threads and barriers are those of POSIX: the headers of C++ threads take more than a second to compile, and threads
// spin at C++ barriers before they wait.

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "cuda_on_threads.h"

struct Barrier {
    pthread_barrier_t barrier;

    void start(int threads) { pthread_barrier_init(&barrier, nullptr, threads); }
    void arrive_and_wait() { pthread_barrier_wait(&barrier); }
};

struct Block {
    Barrier barrier;
    bool all = true;  // atomic
};

thread_local Index threadIdx, blockIdx, gridDim;
thread_local Block* block;

void __syncthreads() { block->barrier.arrive_and_wait(); }

bool __syncthreads_and(bool value) {
    if (!value) __atomic_store_n(&block->all, false, __ATOMIC_SEQ_CST);
    __syncthreads();
    const bool result = __atomic_load_n(&block->all, __ATOMIC_SEQ_CST);
    __syncthreads();
    if (threadIdx.x == 0) __atomic_store_n(&block->all, true, __ATOMIC_SEQ_CST);
    __syncthreads();
    return result;
}

void sleep_us(long microseconds) {
    const timespec time = {0, microseconds * 1000};
    nanosleep(&time, nullptr);
}

// Longer than requested, so that waiting threads leave the cores to others.
void __nanosleep(unsigned) { sleep_us(50); }

unsigned long long clock_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000ull + time.tv_nsec;
}

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
    Barrier barrier;
    Block blocks[MAX_BLOCKS];
};

Call calls[kCalls];
Rank ranks[RANKS];
char* memory[RANKS];
int stops_after = kCalls;  // calls of the last rank
long wrong = 0;            // atomic

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

void run(int rank, int block_number, int thread) {
    Rank& own = ranks[rank];
    threadIdx = {thread}, blockIdx = {block_number}, block = &own.blocks[block_number];
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
            if ((number * 31 + rank) % 17 == 0) sleep_us(200);
        }
        own.barrier.arrive_and_wait();  // a kernel starts when all before it have ended
        if (block_number < call.blocks && call.kind < 2) {
            sums[call.kind][rank](own.tensor, call.size * 2, memory, state, report);
        } else if (block_number < call.blocks) {
            gathers[rank](own.tensor, kGatheredRows, call.size, own.gathered, RANKS * call.size, 0,
                          rank == call.root ? RANKS : 0, memory, state, report);
        }
        own.barrier.arrive_and_wait();
        if (first && own.report[0] == 0)
            __atomic_fetch_add(&wrong, wrong_elements(own, call, number, rank), __ATOMIC_SEQ_CST);
    }
}

void* run_thread(void* argument) {
    const int number = static_cast<int>(reinterpret_cast<long>(argument));
    run(number / (MAX_BLOCKS * THREADS), number / THREADS % MAX_BLOCKS, number % THREADS);
    return nullptr;
}

int main(int argc, char** argv) {
    if (argc > 1) stops_after = atoi(argv[1]);
    srandom(1);
    for (Call& call : calls) {
        call.kind = random() % 3;
        call.root = random() % RANKS;
        call.size = 1 + random() % (call.kind == 2 ? 40 : HALF_BYTES / 2);
        const int vectors = (call.size * 2 + 15) / 16;
        const int items = call.kind == 2 ? call.count() : call.kind == 1 ? (vectors + RANKS - 1) / RANKS : vectors;
        call.blocks = min((items + THREADS - 1) / THREADS, MAX_BLOCKS);
    }
    for (int rank = 0; rank < RANKS; ++rank) {
        memory[rank] = ranks[rank].memory;
        ranks[rank].state.timeout_ns = argc > 1 ? 2'000'000'000 : 60'000'000'000;
        ranks[rank].barrier.start(MAX_BLOCKS * THREADS);
        for (Block& each : ranks[rank].blocks) each.barrier.start(THREADS);
    }
    pthread_t threads[RANKS * MAX_BLOCKS * THREADS];
    long started = 0;
    for (pthread_t& thread : threads)
        if (pthread_create(&thread, nullptr, run_thread, reinterpret_cast<void*>(started++))) abort();
    for (pthread_t thread : threads) pthread_join(thread, nullptr);
    printf("wrong %ld\n", wrong);
    for (const Rank& rank : ranks)
        printf("calls %llu missing %lld at %llu\n", rank.state.calls[0], static_cast<long long>(rank.report[0]) - 1,
               rank.report[1]);
}
