// Rows of bfloat16 against a tile of keys with the matrix unit (AMX): 16 rows at a time, sums in float32.
//
// A B tile wants pairs of neighbours along the sum side by side, so keys and values are interleaved into the workspace
// first, once for all rows. Weights are rounded to bfloat16 before they meet the values, their sum is not.
#pragma once

#include "rows.h"

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// The kernel hands out the tiles' registers on request: ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA.
INLINE bool may_use_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

struct MatrixRows {
    static constexpr int BLOCK = 16, PAIRS = 16, K = 2 * PAIRS;  // rows, and elements along the sum, of a tile

    // The tiles' shape is per thread and belongs to others as well (oneDNN keeps it between its calls): it is put back.
    // Tiles take denormals for zeros: so does everything else meanwhile.
    struct alignas(64) Mode {
        uint8_t before[64];
        const unsigned control = _mm_getcsr();
        Mode() {
            _tile_storeconfig(before);
            _mm_setcsr(control | 0x8040);  // FTZ, DAZ
        }
        ~Mode() {
            _mm_setcsr(control);
            _tile_loadconfig(before);
        }
    };
    struct alignas(64) Shape {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {};
    };

    const Problem& p;
    const Rows rows;
    const bool in_place;
    const int padded, chunks, block;  // chunks of K components; rows of a block: 16, or all if there are fewer
    bf16 *q, *keys, *values, *key_copy = nullptr, *value_copy = nullptr, *weights, *zeros;
    float* scores;
    Tile<bf16> tiles[2];
    bool there = false;  // the part that comes now is in tiles[0]

    static int chunks_of(const Problem& p) { return (p.dim + K - 1) / K; }
    static int state_rows(int rows) { return rows <= BLOCK ? rows : (rows + BLOCK - 1) / BLOCK * BLOCK; }
    static size_t bytes(const Problem& p, const Rows& rows) {
        const size_t chunks = chunks_of(p), padded = p.padded_dim();
        return 2 * (state_rows(rows.count) * chunks * K + TILE * chunks * K + TILE * padded) +
               (lies_in_vectors(p) ? 0 : 2 * (TILE * p.dim + TILE * padded)) + 2 * padded + 6 * BLOCK * TILE + 64 * 8;
    }

    MatrixRows(const Problem& p, const Rows& rows, const bf16* queries, Arena& arena)
        : p(p), rows(rows), in_place(lies_in_vectors(p)), padded(p.padded_dim()), chunks(chunks_of(p)),
          block(std::min(BLOCK, rows.count)) {
        const int count = state_rows(rows.count);
        q = arena.take<bf16>(size_t(count) * chunks * K);
        keys = arena.take<bf16>(size_t(TILE) * chunks * K);
        values = arena.take<bf16>(size_t(TILE) * padded);
        weights = arena.take<bf16>(BLOCK * TILE);
        scores = arena.take<float>(BLOCK * TILE);
        zeros = arena.take<bf16>(padded);
        std::memset(zeros, 0, padded * 2);
        if (!in_place) {
            key_copy = arena.take<bf16>(size_t(TILE) * p.dim);
            value_copy = arena.take<bf16>(size_t(TILE) * padded);
            std::memset(value_copy, 0, TILE * padded * 2);
        }
        std::memset(q, 0, size_t(count) * chunks * K * 2);
        for (int row = 0; row < rows.count; row++) {
            const bf16* from = queries + row / rows.group * p.q_stride + int64_t(row % rows.group) * p.dim;
            bf16* to = q + (row / BLOCK) * int64_t(BLOCK) * chunks * K + row % BLOCK * K;  // [block, chunk, row, K]
            for (int c = 0; c < p.dim; c += K)
                std::memcpy(to + int64_t(c) * block, from + c, std::min(K, p.dim - c) * 2);
        }
        Shape shape;
        for (int t = 0; t < 5; t++) shape.rows[t] = block;  // 0 .. 3 sums, 4 the left factor
        for (int t = 5; t < 8; t++) shape.rows[t] = PAIRS;  // the right factor
        _tile_loadconfig(&shape);
    }

    // 16 columns of two rows, side by side.
    static __attribute__((always_inline)) inline void interleave(const bf16* even, const bf16* odd, bf16* to) {
        hvec a, b;
        std::memcpy(&a, even, sizeof a);
        std::memcpy(&b, odd, sizeof b);
        const uvec pair = widened(a) | (widened(b) << 16);
        std::memcpy(to, &pair, sizeof pair);
    }

    void meet(State& state, const Part& part, const Part* next) {
        if (!there) locate<bf16, bf16>(p, part, key_copy, value_copy, zeros, tiles[0]);
        there = next && in_place;
        if (there) locate<bf16, bf16>(p, *next, nullptr, nullptr, zeros, tiles[1]);
        pack(tiles[0], there ? &tiles[1] : nullptr);
        if (there) tiles[0] = tiles[1];
        for (int g = 0; g < rows.count; g += BLOCK) attend(state, part.start, g);
    }

    // Keys as [chunk, vector of keys, pair of components, 16 x 2], values as [vector of components, pair of keys,
    // 16 x 2].
    void pack(const Tile<bf16>& tile, const Tile<bf16>* next) {
        const int64_t stride = tile.stride;
        for (int d = 0; d < chunks * K; d += 2)
            for (int v = 0; v < NV; v++) {
                const bf16* k = tile.key[v] + d * stride;
                bf16* to = keys + ((d / K * NV + v) * PAIRS + d % K / 2) * 32;
                if (d + 1 < p.dim) {
                    if (next) __builtin_prefetch(next->key[v] + d * stride);
                    if (next && stride >= 32) __builtin_prefetch(next->key[v] + (d + 1) * stride);
                    interleave(k, k + stride, to);
                } else if (d < p.dim) {
                    interleave(k, zeros, to);
                } else {
                    std::memset(to, 0, 64);
                }
            }
        for (int j = 0; j < TILE; j += 2)
            for (int c = 0; c < padded; c += LANES) {
                if (next && c % 32 == 0) {
                    __builtin_prefetch(next->value[j] + c);
                    __builtin_prefetch(next->value[j + 1] + c);
                }
                interleave(tile.value[j] + c, tile.value[j + 1] + c, values + (c * TILE / 32 + j / 2) * 32);
            }
    }

    void attend(State& state, int start, int g) {
        int from[BLOCK], seen[BLOCK];
        bool any = false;
        for (int r = 0; r < block; r++) {
            const int at = rows.at(g + r);
            seen[r] = std::clamp(at + 1 - start, 0, TILE);
            from[r] = std::clamp(p.lowest(at) - start, 0, seen[r]);
            any |= from[r] < seen[r];
        }
        if (!any) return;
        static_assert(NV == 4);
        const bf16* left = q + int64_t(g) * chunks * K;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int c = 0; c < chunks; c++) {
            const bf16* right = keys + c * NV * PAIRS * 32;
            _tile_loadd(4, left + c * block * K, 64);
            _tile_loadd(5, right, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, right + PAIRS * 32, 64);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(7, right + 2 * PAIRS * 32, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(5, right + 3 * PAIRS * 32, 64);
            _tile_dpbf16ps(3, 4, 5);
        }
        _tile_stored(0, scores, TILE * 4);
        _tile_stored(1, scores + LANES, TILE * 4);
        _tile_stored(2, scores + 2 * LANES, TILE * 4);
        _tile_stored(3, scores + 3 * LANES, TILE * 4);
        for (int r = 0; r < block; r++) {
            const float alpha = soften(scores + r * TILE, p.scale * 1.44269504f, from[r], seen[r], weights + r * TILE,
                                       state.top + g + r, state.total + (g + r) * LANES);
            float* acc = state.acc + int64_t(g + r) * padded;
            if (alpha != 1.0f)
                for (int c = 0; c < padded; c += LANES) store(acc + c, load(acc + c) * alpha);
        }
        float* acc = state.acc + int64_t(g) * padded;
        int c = 0;
        for (; c + 4 * LANES <= padded; c += 4 * LANES) accumulate<4>(acc + c, values + c * TILE);
        for (; c < padded; c += LANES) accumulate<1>(acc + c, values + c * TILE);
    }

    // W vectors of components of a block of rows: acc += weights * values.
    template <int W>
    void accumulate(float* acc, const bf16* right) {
        const int64_t width = padded * 4;
        _tile_loadd(0, acc, width);
        if constexpr (W == 4) {
            _tile_loadd(1, acc + LANES, width);
            _tile_loadd(2, acc + 2 * LANES, width);
            _tile_loadd(3, acc + 3 * LANES, width);
        }
        for (int k = 0; k < TILE / K; k++, right += PAIRS * 32) {
            _tile_loadd(4, weights + k * K, TILE * 2);
            _tile_loadd(5, right, 64);
            _tile_dpbf16ps(0, 4, 5);
            if constexpr (W == 4) {
                _tile_loadd(6, right + TILE * LANES, 64);
                _tile_dpbf16ps(1, 4, 6);
                _tile_loadd(7, right + 2 * TILE * LANES, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_loadd(5, right + 3 * TILE * LANES, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        _tile_stored(0, acc, width);
        if constexpr (W == 4) {
            _tile_stored(1, acc + LANES, width);
            _tile_stored(2, acc + 2 * LANES, width);
            _tile_stored(3, acc + 3 * LANES, width);
        }
    }
};

}  // namespace

#else
namespace {
INLINE bool may_use_tiles() { return true; }
}  // namespace
#endif
