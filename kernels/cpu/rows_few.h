// Few rows of bfloat16 against a tile of keys, read as they lie, with vector instructions: what a decode needs.
//
// Tiles of AMX are for many rows: they want keys and values interleaved first, which costs more than the products of a
// decode. Here each element is widened and met by the instructions that a tile is defined by (Intel's manual,
// TDPBF16PS: one chain of fused additions over the first elements of 16 pairs, one over the second, their sum added to
// what was there; denormals are zero). So a row has the same bits in both forms: `forms_agree` makes sure.
#pragma once

#include "rows_matrix.h"

#ifdef __AMX_BF16__

namespace {

struct FewRows {
    static constexpr int MOST = 12, MR = 6, K = MatrixRows::K;  // rows; rows in registers; elements of a tile's sum
    static constexpr int HALF = TILE / 2;
    static_assert(NV == 4);

    const Problem& p;
    const Rows rows;
    const int padded;
    float *q, *weights;
    bf16 *narrow, *zeros;
    Tile<bf16> tiles[2];
    bool there = false;  // the part that comes now is in tiles[0]

    static bool suits(const Problem& p, int rows) { return lies_in_vectors(p) && rows <= MOST; }
    static int state_rows(int rows) { return rows; }
    static size_t bytes(const Problem& p, const Rows& rows) {
        return Arena::rounded(4 * size_t(rows.count) * p.dim) + 6 * MR * TILE + Arena::rounded(2 * p.dim);
    }

    FewRows(const Problem& p, const Rows& rows, const bf16* queries, Arena& arena)
        : p(p), rows(rows), padded(p.padded_dim()) {
        q = arena.take<float>(size_t(rows.count) * p.dim);
        weights = arena.take<float>(MR * TILE);
        narrow = arena.take<bf16>(MR * TILE);
        zeros = arena.take<bf16>(p.dim);
        std::memset(zeros, 0, p.dim * 2);
        for (int row = 0; row < rows.count; row++) {
            const int r = row % MR, width = std::min(MR, rows.count - (row - r));
            float* to = q + int64_t(row - r) * p.dim + r;
            const bf16* from = queries + row / rows.group * p.q_stride + int64_t(row % rows.group) * p.dim;
            for (int d = 0; d < p.dim; d++) to[d * width] = widen(from[d]);
        }
    }

    void meet(State& state, const Part& part, const Part* following) {
        if (!there) locate<bf16, bf16>(p, part, nullptr, nullptr, zeros, tiles[0]);
        there = following;
        if (there) locate<bf16, bf16>(p, *following, nullptr, nullptr, zeros, tiles[1]);
        const Tile<bf16>* next = there ? &tiles[1] : nullptr;
        for (int g = 0; g < rows.count; g += MR, next = nullptr) {
            switch (std::min(MR, rows.count - g)) {
                case 1: attend<1>(state, part.start, g, next); break;
                case 2: attend<2>(state, part.start, g, next); break;
                case 3: attend<3>(state, part.start, g, next); break;
                case 4: attend<4>(state, part.start, g, next); break;
                case 5: attend<5>(state, part.start, g, next); break;
                case 6: attend<6>(state, part.start, g, next); break;
            }
        }
        if (there) tiles[0] = tiles[1];
    }

    INLINE vec fused(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
    // A product that must not be fused with the addition after it.
    INLINE vec apart(vec x) {
        asm("" : "+v"(x));
        return x;
    }

    template <int R>
    void attend(State& state, int start, int g, const Tile<bf16>* next) {
        int from[R], seen[R], first = TILE, keys = 0;
        for (int r = 0; r < R; r++) {
            const int at = rows.at(g + r);
            seen[r] = std::clamp(at + 1 - start, 0, TILE);
            from[r] = std::clamp(p.lowest(at) - start, 0, seen[r]);
            if (from[r] == seen[r]) continue;
            first = std::min(first, from[r]);
            keys = std::max(keys, seen[r]);
        }
        if (first >= keys) return;
        constexpr int V = R <= 3 ? 4 : 2;  // vectors at once: twice R * V sums in 32 registers
        const float* rows_q = q + int64_t(g) * p.dim;
        if (first >= HALF) score<R, 2>(rows_q, next, 2);
        else if (keys <= HALF) score<R, 2>(rows_q, next, 0);
        else
            for (int v = 0; v < NV; v += V) score<R, V>(rows_q, next, v);
        float* acc = state.acc + int64_t(g) * padded;
        for (int r = 0; r < R; r++) {
            const float alpha = soften(weights + r * TILE, p.scale * 1.44269504f, from[r], seen[r], narrow + r * TILE,
                                       state.top + g + r, state.total + (g + r) * LANES);
            for (int v = 0; v < NV; v++) store(weights + r * TILE + v * LANES, load(narrow + r * TILE + v * LANES));
            if (alpha != 1.0f)
                for (int c = 0; c < padded; c += LANES)
                    store(acc + r * padded + c, apart(load(acc + r * padded + c) * alpha));
        }
        int c = 0;
        for (; c + V * LANES <= padded; c += V * LANES) accumulate<R, V>(acc, next, c, first, keys);
        for (; c < padded; c += LANES) accumulate<R, 1>(acc, next, c, first, keys);
    }

    // Scores of R rows and the V vectors of keys from v0, into `weights`.
    template <int R, int V>
    void score(const float* q, const Tile<bf16>* next, int v0) {
        const int64_t stride = tiles[0].stride;
        vec sums[R][V] = {};
        for (int c = 0; c < p.dim; c += K) {
            vec even[R][V] = {}, odd[R][V] = {};
            for (int d = c; d < std::min(c + K, p.dim); d += 2) {
                if (next)
                    for (int v = 0; v < V; v++) {
                        fetch(next->key[v0 + v] + d * stride);
                        if (stride >= 2 * LANES) fetch(next->key[v0 + v] + (d + 1) * stride);
                    }
                for (int v = 0; v < V; v++) {
                    const bf16* k = tiles[0].key[v0 + v] + d * stride;
                    const vec a = load(k), b = load(k + stride);
                    for (int r = 0; r < R; r++) even[r][v] = fused(splat(q[d * R + r]), a, even[r][v]);
                    for (int r = 0; r < R; r++) odd[r][v] = fused(splat(q[d * R + R + r]), b, odd[r][v]);
                }
            }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) sums[r][v] += even[r][v] + odd[r][v];
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) store(weights + r * TILE + (v0 + v) * LANES, sums[r][v]);
    }

    // acc += weights * values for W vectors of components from column c.
    template <int R, int W>
    void accumulate(float* acc, const Tile<bf16>* next, int c, int first, int keys) {
        for (int j0 = first / K * K; j0 < keys; j0 += K) {
            vec even[R][W] = {}, odd[R][W] = {};
            for (int j = j0; j < std::min(j0 + K, keys); j += 2) {
                if (next)
                    for (int w = 0; w < W; w += 2) {
                        fetch(next->value[j] + c + w * LANES);
                        fetch(next->value[j + 1] + c + w * LANES);
                    }
                for (int w = 0; w < W; w++) {
                    const vec a = load(tiles[0].value[j] + c + w * LANES);
                    const vec b = load(tiles[0].value[j + 1] + c + w * LANES);
                    for (int r = 0; r < R; r++) even[r][w] = fused(splat(weights[r * TILE + j]), a, even[r][w]);
                    for (int r = 0; r < R; r++) odd[r][w] = fused(splat(weights[r * TILE + j + 1]), b, odd[r][w]);
                }
            }
            for (int r = 0; r < R; r++)
                for (int w = 0; w < W; w++) {
                    float* to = acc + r * padded + c + w * LANES;
                    store(to, load(to) + (even[r][w] + odd[r][w]));
                }
        }
    }
};

}  // namespace

#endif
