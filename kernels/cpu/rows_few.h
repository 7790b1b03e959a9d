// Few rows of bfloat16 against a tile of keys of a paired cache (layout.h), with vector instructions: what a decode
// needs. It waits for memory, and reads it line by line at an even pace, which the processor's prefetching follows;
// loads of whole tiles come in bursts.
//
// Each element is widened and met by the instructions that a tile is defined by (Intel's manual, TDPBF16PS: one chain of
// fused additions over the first elements of the pairs, one over the second, their sum added to what was there;
// denormals are zero). So a row has the same bits in both forms: `forms_agree` makes sure.
#pragma once

#include "rows_matrix.h"

#ifdef __AMX_BF16__

namespace {

struct FewRows {
    static constexpr int MOST = 12, MR = 6, K = MatrixRows::K;  // rows; rows in registers; components of a tile's sum
    using Groups = MatrixRows::Groups;

    const Problem& p;
    const Rows rows;
    const int padded;
    float *q, *weights;
    bf16 *narrow, *value_copy;
    Groups groups, next;

    static bool suits(const Problem& p, int rows) { return p.layout.paired && rows <= MOST; }
    static int state_rows(int rows) { return rows; }
    static size_t bytes(const Problem& p, const Rows& rows) {
        return Arena::rounded(4 * size_t(rows.count) * p.dim) + 6 * MR * TILE + 2 * TILE * p.dim;
    }

    FewRows(const Problem& p, const Rows& rows, const bf16* queries, Arena& arena)
        : p(p), rows(rows), padded(p.padded_dim()) {
        q = arena.take<float>(size_t(rows.count) * p.dim);
        weights = arena.take<float>(MR * TILE);
        narrow = arena.take<bf16>(MR * TILE);
        value_copy = arena.take<bf16>(size_t(TILE) * p.dim);
        for (int row = 0; row < rows.count; row++) {
            const int r = row % MR, width = std::min(MR, rows.count - (row - r));
            float* to = q + int64_t(row - r) * p.dim + r;
            const bf16* from = queries + row / rows.group * p.q_stride + int64_t(row % rows.group) * p.dim;
            for (int d = 0; d < p.dim; d++) to[d * width] = widen(from[d]);
        }
    }

    void meet(State& state, const Part& part, const Part* following) {
        groups = MatrixRows::locate(p, part);
        MatrixRows::mask(part, groups, value_copy, padded);
        next = following ? MatrixRows::locate(p, *following) : Groups{};
        for (int g = 0; g < rows.count; g += MR, next = Groups{}) {
            switch (std::min(MR, rows.count - g)) {
                case 1: attend<1>(state, part.start, g); break;
                case 2: attend<2>(state, part.start, g); break;
                case 3: attend<3>(state, part.start, g); break;
                case 4: attend<4>(state, part.start, g); break;
                case 5: attend<5>(state, part.start, g); break;
                case 6: attend<6>(state, part.start, g); break;
            }
        }
    }

    INLINE vec fused(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
    // A product that must not be fused with the addition after it.
    INLINE vec apart(vec x) {
        asm("" : "+v"(x));
        return x;
    }

    template <int R>
    void attend(State& state, int start, int g) {
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
        const int lo = first / LANES, hi = (keys + LANES - 1) / LANES;
        const float* rows_q = q + int64_t(g) * p.dim;
        int v = lo;
        for (; v + V <= hi; v += V) score<R, V>(rows_q, v);
        for (; v < hi; v++) score<R, 1>(rows_q, v);
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
        for (; c + V * LANES <= padded; c += V * LANES) accumulate<R, V>(acc, c, lo, hi);
        for (; c < padded; c += LANES) accumulate<R, 1>(acc, c, lo, hi);
    }

    // Scores of R rows and the V vectors of keys from v0, into `weights`.
    template <int R, int V>
    void score(const float* q, int v0) {
        const bf16 *key[V], *ahead[V];
        for (int v = 0; v < V; v++) {
            key[v] = groups.key[v0 + v];
            const bool there = v0 + v >= next.first && v0 + v < next.last;
            ahead[v] = there ? next.key[v0 + v] : key[v];
        }
        const int64_t stride = groups.stride;
        vec sums[R][V] = {};
        for (int c = 0; c < p.dim; c += K) {
            vec even[R][V] = {}, odd[R][V] = {};
            for (int d = c; d < std::min(c + K, p.dim); d += 2) {
                for (int v = 0; v < V; v++) {
                    fetch(ahead[v] + d / 2 * stride);
                    const uvec pairs = load_pairs(key[v] + d / 2 * stride);
                    const vec a = first_of(pairs), b = second_of(pairs);
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
    void accumulate(float* acc, int c, int lo, int hi) {
        for (int v = lo; v < hi; v++) {
            const bf16* from = groups.value[v] + 2 * c;
            const bf16* ahead = v >= next.first && v < next.last ? next.value[v] + 2 * c : from;
            const float* w = weights + v * LANES;
            vec even[R][W] = {}, odd[R][W] = {};
            for (int j = 0; j < LANES; j += 2)
                for (int x = 0; x < W; x++) {
                    fetch(ahead + j * padded + 2 * x * LANES);
                    const uvec pairs = load_pairs(from + j * padded + 2 * x * LANES);
                    const vec a = first_of(pairs), b = second_of(pairs);
                    for (int r = 0; r < R; r++) even[r][x] = fused(splat(w[r * TILE + j]), a, even[r][x]);
                    for (int r = 0; r < R; r++) odd[r][x] = fused(splat(w[r * TILE + j + 1]), b, odd[r][x]);
                }
            for (int r = 0; r < R; r++)
                for (int x = 0; x < W; x++) {
                    float* to = acc + r * padded + c + x * LANES;
                    store(to, load(to) + (even[r][x] + odd[r][x]));
                }
        }
    }
};

}  // namespace

#endif
