// Copies within the pool of KV blocks: every pair of a step, all layers, keys and values, in one launch.
//
// A block is `rows` rows (keys of layer 0, values of layer 0, keys of layer 1, ...) of `row_bytes` each, one behind
// the other, and a row holds `token_bytes` for each of its tokens. A copy moves the first tokens of every row; where
// that is all of them, the block is one contiguous range.
//
// The grid: x is the slice of a block, y the pair. Threads know nothing of each other, so the pairs of a launch run in
// no order; the caller sees to it that no block is both a source and a destination, and none a destination twice.
//
// Needs no header, so that it compiles at start with the compiler library alone.

struct Copy {
    int src;
    int dst;
    int tokens;
};

// Accesses that a thread has under way at once: all loads are issued before the first store waits for one.
constexpr int IN_FLIGHT = 4;
constexpr unsigned NOWHERE = ~0u;

// Copies the first `width` units of each of `rows` rows that lie `pitch` units apart. Thread `worker` of `workers`
// takes every workers-th unit, so that neighbours touch neighbouring addresses; the walk needs no division after the
// first. 32 bits are enough here, since the host refuses blocks of 2 GiB and more.
template <typename Unit>
__device__ void copy_rows(const char* src, char* dst, unsigned rows, unsigned width, unsigned pitch, unsigned worker,
                          unsigned workers) {
    if (width == 0) return;
    const Unit* from = reinterpret_cast<const Unit*>(src);
    Unit* to = reinterpret_cast<Unit*>(dst);
    const unsigned row_step = workers / width;
    const unsigned column_step = workers % width;
    unsigned row = worker / width;
    unsigned column = worker % width;
    while (row < rows) {
        Unit held[IN_FLIGHT];
        unsigned at[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            at[i] = row < rows ? row * pitch + column : NOWHERE;
            if (at[i] != NOWHERE) held[i] = from[at[i]];
            row += row_step;
            column += column_step;
            if (column >= width) {
                column -= width;
                ++row;
            }
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            if (at[i] != NOWHERE) to[at[i]] = held[i];
        }
    }
}

// Copies by `Unit`, and the bytes at the end of each row that fill no unit one by one. Every row must begin at a
// multiple of the unit's size. Offsets of blocks are 64 bits wide: pools are larger than 4 GiB.
template <typename Unit>
__device__ void copy_blocks(char* pool, const Copy* copies, long long count, long long rows, long long row_bytes,
                            long long token_bytes) {
    const unsigned worker = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned workers = gridDim.x * blockDim.x;
    const long long block_bytes = rows * row_bytes;
    for (long long pair = blockIdx.y; pair < count; pair += gridDim.y) {
        const Copy copy = copies[pair];
        const char* src = pool + copy.src * block_bytes;
        char* dst = pool + copy.dst * block_bytes;
        unsigned ranges = static_cast<unsigned>(rows);
        unsigned length = static_cast<unsigned>(copy.tokens * token_bytes);
        if (length == row_bytes) {
            ranges = 1;
            length = static_cast<unsigned>(block_bytes);
        }
        const unsigned units = length / sizeof(Unit);
        copy_rows<Unit>(src, dst, ranges, units, static_cast<unsigned>(row_bytes / sizeof(Unit)), worker, workers);
        const unsigned done = units * sizeof(Unit);
        copy_rows<unsigned char>(src + done, dst + done, ranges, length - done, static_cast<unsigned>(row_bytes),
                                 worker, workers);
    }
}

// Where every row begins at a multiple of 16 bytes, which is so for any model with blocks of 16 tokens.
extern "C" __global__ void __launch_bounds__(256)
copy_vectors(char* pool, const Copy* copies, long long count, long long rows, long long row_bytes,
             long long token_bytes) {
    copy_blocks<uint4>(pool, copies, count, rows, row_bytes, token_bytes);
}

// Where rows begin anywhere.
extern "C" __global__ void __launch_bounds__(256)
copy_bytes(char* pool, const Copy* copies, long long count, long long rows, long long row_bytes,
           long long token_bytes) {
    copy_blocks<unsigned char>(pool, copies, count, rows, row_bytes, token_bytes);
}
