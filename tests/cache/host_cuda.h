// Enough of CUDA C++ for the host's compiler to build the package's kernels, and to run a grid one thread at a time.
#pragma once

#define __global__
#define __device__
#define __launch_bounds__(threads)

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

struct Dimensions {
    unsigned x = 1, y = 1, z = 1;
};

inline Dimensions gridDim, blockDim, blockIdx, threadIdx;

// Calls a kernel for every thread of a grid. Good for kernels whose threads do not wait for each other.
template <typename Kernel, typename... Arguments>
void run_grid(Dimensions grid, unsigned threads, Kernel kernel, Arguments... arguments) {
    gridDim = grid;
    blockDim = {threads, 1, 1};
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(arguments...);
}
