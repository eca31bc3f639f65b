// Runs the copy kernel on the host: as a library, and as a program that AddressSanitizer watches over.
//
// The program reads one launch and the pool that it runs on from standard input, and writes the pool to standard output.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "host_cuda.h"

#include KERNEL_SOURCE

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size)
#define ASAN_UNPOISON_MEMORY_REGION(address, size)
#endif

extern "C" void run_copy(int vectors, unsigned grid_x, unsigned grid_y, unsigned threads, char* pool,
                         const Copy* copies, long long count, long long rows, long long row_bytes,
                         long long token_bytes) {
    run_grid({grid_x, grid_y, 1}, threads, vectors ? copy_vectors : copy_bytes, pool, copies, count, rows, row_bytes,
             token_bytes);
}

struct Header {
    int64_t vectors, grid_x, grid_y, threads;
    int64_t count, rows, row_bytes, token_bytes;
    int64_t num_blocks;
    int64_t offset;  // of the pool from an address that 16 divides
};

static void read(void* to, size_t bytes) {
    if (std::fread(to, 1, bytes, stdin) != bytes) std::exit(2);
}

int main() {
    Header c;
    read(&c, sizeof c);
    const size_t block_bytes = c.rows * c.row_bytes;
    const size_t pool_bytes = c.num_blocks * block_bytes;
    // From the heap and no byte longer, so that an access beyond either end is seen.
    Copy* copies = static_cast<Copy*>(std::malloc(c.count * sizeof(Copy)));
    char* memory = static_cast<char*>(std::malloc(pool_bytes + c.offset));
    if (copies == nullptr || memory == nullptr) return 3;
    char* pool = memory + c.offset;
    read(copies, c.count * sizeof(Copy));
    read(pool, pool_bytes);
    std::set<int64_t> named;
    for (int64_t i = 0; i < c.count; ++i) named.insert({copies[i].src, copies[i].dst});
    for (int64_t block = 0; block < c.num_blocks; ++block) {
        if (!named.count(block)) {
            ASAN_POISON_MEMORY_REGION(pool + block * block_bytes, block_bytes);
        }
    }
    run_copy(static_cast<int>(c.vectors), c.grid_x, c.grid_y, c.threads, pool, copies, c.count, c.rows, c.row_bytes,
             c.token_bytes);
    ASAN_UNPOISON_MEMORY_REGION(pool, pool_bytes);
    std::fwrite(pool, 1, pool_bytes, stdout);
    std::free(copies);
    std::free(memory);
    return 0;
}
