// Rows against a tile of keys with vector instructions: MR rows at a time, in float32.
//
// The last group of an item has fewer rows, and each number of rows is compiled apart; a row takes the same
// instructions in all of them.
#pragma once

#include "rows.h"

namespace {

constexpr int MR = 6;  // rows in registers
// Vectors of keys or components in registers at once: MR * STEP accumulators, of 32 registers or of 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int STEP = 4;
#else
constexpr int STEP = 2;
#endif

// Where the keys and values of a tile are. E is float, or bfloat16 in a paired cache (layout.h), where all is met by
// pairs: component d of vector v is at key[v] + d * stride, and a key's values stand at its pair's.
template <class E>
struct Tile {
    const E* key[NV];
    int64_t stride;
    const E* value[TILE];  // rows of the tile that no row may see point to zeros
};

// R rows of scores [R, TILE]. q is [dim, R]. The same places of the next tile are fetched ahead, where there is one.
template <int R, class E>
INLINE void score(const float* q, const Tile<E>& tile, const Tile<E>* next, int dim, float* scores) {
    constexpr int PAIR = sizeof(E) == 2 ? 2 : 1;
    for (int v0 = 0; v0 < NV; v0 += STEP) {
        vec a[R][STEP] = {};
        for (int d = 0; d < dim; d += PAIR) {
            if (next)
                for (int v = 0; v < STEP; v++) fetch(next->key[v0 + v] + d * tile.stride);
            if constexpr (PAIR == 2) {
                uvec k[STEP];
                for (int v = 0; v < STEP; v++) k[v] = load_pairs(tile.key[v0 + v] + d * tile.stride);
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < STEP; v++) a[r][v] += q[d * R + r] * first_of(k[v]);
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < STEP; v++) a[r][v] += q[d * R + R + r] * second_of(k[v]);
            } else {
                vec k[STEP];
                for (int v = 0; v < STEP; v++) k[v] = load(tile.key[v0 + v] + d * tile.stride);
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < STEP; v++) a[r][v] += q[d * R + r] * k[v];
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < STEP; v++) store(scores + r * TILE + (v0 + v) * LANES, a[r][v]);
    }
}

// A vector of components of key j, from column c.
INLINE vec value_at(const Tile<float>& tile, int j, int c) { return load(tile.value[j] + c); }
INLINE vec value_at(const Tile<bf16>& tile, int j, int c) {
    const uvec pairs = load_pairs(tile.value[j] + 2 * c);
    return j % 2 ? second_of(pairs) : first_of(pairs);
}

// acc = acc * alpha + weights * values for W vectors of components from column c.
template <int R, int W, class E>
INLINE void accumulate(float* acc, int64_t width, const float* alpha, const float* weights, const Tile<E>& tile,
                       const Tile<E>* next, int c, int first, int keys) {
    vec a[R][W];
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) a[r][w] = load(acc + r * width + c + w * LANES) * alpha[r];
    for (int j = first; j < keys; j++) {
        if (next)
            for (int w = 0; w < W; w++) fetch(next->value[j] + (c + w * LANES) * (4 / sizeof(E)));
        vec x[W];
        for (int w = 0; w < W; w++) x[w] = value_at(tile, j, c + w * LANES);
        for (int r = 0; r < R; r++)
            for (int w = 0; w < W; w++) a[r][w] += weights[r * TILE + j] * x[w];
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) store(acc + r * width + c + w * LANES, a[r][w]);
}

template <class T>
struct VectorRows {
    struct Mode {
        Mode() {}  // nothing to prepare for a thread
    };

    const Problem& p;
    const Rows rows;
    const bool in_place;
    const int padded;
    float *q, *weights, *keys = nullptr, *values = nullptr, *zeros;
    Tile<T> tiles[2];
    Tile<float> copy;
    bool there = false;  // the part that comes now is in tiles[0]

    // Where a vector of keys lies in one block, and values in whole vectors. Several groups of rows pay for one
    // conversion to float32.
    static bool reads_in_place(const Problem& p, const Rows& rows) {
        if (sizeof(T) == 2) return p.layout.paired && rows.count <= 2 * MR;
        return p.block_size % LANES == 0 && p.dim % LANES == 0;
    }
    static int state_rows(int rows) { return rows; }
    static size_t bytes(const Problem& p, const Rows& rows) {
        const size_t dim = p.dim, padded = p.padded_dim();
        return Arena::rounded(4 * (rows.count + MR) * dim) + Arena::rounded(4 * MR * TILE) +
               Arena::rounded(8 * padded) +
               (reads_in_place(p, rows) ? 0 : Arena::rounded(4 * TILE * dim) + Arena::rounded(4 * TILE * padded));
    }

    VectorRows(const Problem& p, const Rows& rows, const T* queries, Arena& arena)
        : p(p), rows(rows), in_place(reads_in_place(p, rows)), padded(p.padded_dim()) {
        q = arena.take<float>(size_t(rows.count + MR) * p.dim);
        weights = arena.take<float>(MR * TILE);
        zeros = arena.take<float>(2 * padded);
        std::fill(zeros, zeros + 2 * padded, 0.0f);
        if (!in_place) {
            keys = arena.take<float>(size_t(TILE) * p.dim);
            values = arena.take<float>(size_t(TILE) * padded);
            std::fill(values, values + TILE * padded, 0.0f);
        }
        const float scale = p.scale * 1.44269504f;  // weights are powers of 2
        for (int row = 0; row < rows.count; row++) {
            const int r = row % MR, width = std::min(MR, rows.count - (row - r));
            float* to = q + int64_t(row - r) * p.dim + r;
            const T* from = queries + row / rows.group * p.q_stride + int64_t(row % rows.group) * p.dim;
            for (int d = 0; d < p.dim; d++) to[d * width] = widen(from[d]) * scale;
        }
    }

    // next: what will be met after this part, here or (where it is another item's) by another object; may be null.
    void meet(State& state, const Part& part, const Part* next) {
        if (!in_place) {
            copy_part(part);
            return groups(state, part.start, copy, static_cast<const Tile<float>*>(nullptr));
        }
        if (!there) locate(part, tiles[0]);
        there = next && rows.count <= 2 * MR;
        if (there) locate(*next, tiles[1]);
        groups(state, part.start, tiles[0], there ? &tiles[1] : nullptr);
        if (there) tiles[0] = tiles[1];
    }

    // Calls f(first key of the tile, its offset in a block, number of keys, the block's keys, its values) for each piece.
    template <class F>
    void for_blocks(const Part& part, F f) const {
        const Item& item = *part.item;
        const int32_t* table = p.table + item.sequence * p.table_width;
        for (int j = part.first; j < part.last;) {
            const int block = (part.start + j) / p.block_size, offset = (part.start + j) % p.block_size;
            const int n = std::min(p.block_size - offset, part.last - j);
            const int64_t base = (table[block] * int64_t(p.kv_heads) + item.kv_head) * p.layout.size();
            f(j, offset, n, static_cast<const T*>(p.k_cache) + base, static_cast<const T*>(p.v_cache) + base);
            j += n;
        }
    }

    void locate(const Part& part, Tile<T>& tile) const {
        const T* none = reinterpret_cast<const T*>(zeros);
        tile.stride = p.block_size;
        for (int j = 0; j < TILE; j++)
            if (j < part.first || j >= part.last) tile.value[j] = none;
        for_blocks(part, [&](int j, int offset, int n, const T* k, const T* v) {
            for (int i = j / LANES; i * LANES < j + n; i++)
                tile.key[i] = k + (offset + i * LANES - j) * int(4 / sizeof(T));
            for (int i = 0; i < n; i++)
                tile.value[j + i] = v + p.layout.value(p.layout.paired ? (offset + i) / 2 * 2 : offset + i, 0);
        });
        // Vectors before the first and past the last key: any readable address, their scores are masked.
        const int begin = part.first / LANES, end = (part.last + LANES - 1) / LANES;
        for (int i = 0; i < NV; i++)
            if (i < begin || i >= end) tile.key[i] = tile.key[begin];
    }

    // The part in float32: keys [dim, TILE], values [TILE, padded_dim].
    void copy_part(const Part& part) {
        copy.stride = TILE;
        for (int v = 0; v < NV; v++) copy.key[v] = keys + v * LANES;
        for (int j = 0; j < TILE; j++)
            copy.value[j] = j < part.first || j >= part.last ? zeros : values + int64_t(j) * padded;
        for_blocks(part, [&](int j, int offset, int n, const T* k, const T* v) {
            if constexpr (sizeof(T) == 2)
                if (p.layout.paired) return copy_pairs(j, offset, n, k, v);
            for (int i = 0; i < n; i++)
                for (int d = 0; d < p.dim; d++) {
                    keys[int64_t(d) * TILE + j + i] = widen(k[p.layout.key(d, offset + i)]);
                    values[int64_t(j + i) * padded + d] = widen(v[p.layout.value(offset + i, d)]);
                }
        });
    }

    // Whole vectors of keys, in which a few more than the n may be converted.
    void copy_pairs(int j, int offset, int n, const bf16* k, const bf16* v) {
        const int before = j % LANES;
        for (int d = 0; d < p.dim; d += 2)
            for (int i = -before; i < n; i += LANES) {
                const uvec pairs = load_pairs(k + p.layout.key(d, offset + i));
                store(keys + int64_t(d) * TILE + j + i, first_of(pairs));
                store(keys + int64_t(d + 1) * TILE + j + i, second_of(pairs));
            }
        for (int i = 0; i < n; i++) {
            const bf16* from = v + p.layout.value((offset + i) / 2 * 2, 0);
            for (int c = 0; c < p.dim; c += LANES) {
                const uvec pairs = load_pairs(from + 2 * c);
                store(values + int64_t(j + i) * padded + c, (offset + i) % 2 ? second_of(pairs) : first_of(pairs));
            }
        }
    }

    template <class E>
    void groups(State& state, int start, const Tile<E>& tile, const Tile<E>* next) {
        for (int g = 0; g < rows.count; g += MR) {
            switch (std::min(MR, rows.count - g)) {
                case 1: attend<1>(state, start, g, tile, next); break;
                case 2: attend<2>(state, start, g, tile, next); break;
                case 3: attend<3>(state, start, g, tile, next); break;
                case 4: attend<4>(state, start, g, tile, next); break;
                case 5: attend<5>(state, start, g, tile, next); break;
                case 6: attend<6>(state, start, g, tile, next); break;
            }
            next = nullptr;  // once is enough
        }
    }

    template <int R, class E>
    void attend(State& state, int start, int g, const Tile<E>& tile, const Tile<E>* next) {
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
        score<R>(q + int64_t(g) * p.dim, tile, next, p.dim, weights);
        float alpha[R];
        for (int r = 0; r < R; r++)
            alpha[r] = soften(weights + r * TILE, 1.0f, from[r], seen[r], weights + r * TILE, state.top + g + r,
                              state.total + (g + r) * LANES);
        float* acc = state.acc + int64_t(g) * padded;
        int c = 0;
        for (; c + STEP * LANES <= padded; c += STEP * LANES)
            accumulate<R, STEP>(acc, padded, alpha, weights, tile, next, c, first, keys);
        switch ((padded - c) / LANES) {
            case 3: accumulate<R, 3>(acc, padded, alpha, weights, tile, next, c, first, keys); break;
            case 2: accumulate<R, 2>(acc, padded, alpha, weights, tile, next, c, first, keys); break;
            case 1: accumulate<R, 1>(acc, padded, alpha, weights, tile, next, c, first, keys); break;
        }
    }
};

}  // namespace
