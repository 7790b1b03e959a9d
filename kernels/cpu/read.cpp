// A plain read of memory: what the bandwidth of every other kernel is held against.

#include "simd.h"

extern "C" {

// Adds n floats (a multiple of 8 * LANES is used) on so many threads; *total keeps the loads alive.
int bm_read(const float* p, int64_t n, float* total, int32_t threads) {
    constexpr int STEP = 8;  // vectors in flight
    float all = 0;
#pragma omp parallel num_threads(threads) reduction(+ : all)
    {
        vec part[STEP] = {};
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n / (STEP * LANES); i++)
            for (int s = 0; s < STEP; s++) part[s] += load(p + (i * STEP + s) * LANES);
        for (int s = 0; s < STEP; s++) all += sum(part[s]);
    }
    *total = all;
    return 0;
}
}
