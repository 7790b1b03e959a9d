// What the vector and the matrix form of attention share: the problem, a tile's place in the cache, the online softmax,
// and the merge of segments.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "layout.h"
#include "simd.h"

namespace {

constexpr int TILE = 64;  // keys that are met at once
constexpr int NV = TILE / LANES;

struct Problem {
    const void *q, *k_cache, *v_cache;
    void* out;
    int64_t q_stride, out_stride, table_width;
    const int32_t *cu_q, *kv_len, *table;
    int heads, kv_heads, dim, block_size;
    float scale;
    int window;  // 0: none
    Layout layout;
    int group() const { return heads / kv_heads; }
    int padded_dim() const { return (dim + LANES - 1) / LANES * LANES; }
    // The first key that a query at this position sees.
    int lowest(int position) const { return window && position >= window ? position - window + 1 : 0; }
};

// The rows of one work item: the queries first .. first + count - 1 of a sequence, each with the heads of its group.
struct Item {
    int64_t cost;
    int32_t sequence, kv_head, first, count;
    int32_t split, segment;  // -1: all segments; else a part of splits[split]
};

// A tile of an item: it begins at position `start`, and some row sees its keys first .. last - 1.
struct Part {
    const Item* item;
    int start, first, last;
};

struct Rows {
    int count, group, position;  // the first row's query sits at this position
    int at(int row) const { return position + std::min(row, count - 1) / group; }
};

// Memory that a thread keeps from call to call, dealt out in pieces of whole cache lines.
struct Arena {
    std::vector<char> memory;
    size_t used = 0;

    void reserve(size_t bytes) {
        if (memory.size() < bytes + 64) memory.assign(bytes + 64, 0);
        used = (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    }
    static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }
    template <class T>
    T* take(size_t n) {
        T* piece = reinterpret_cast<T*>(memory.data() + used);
        used += rounded(n * sizeof(T));
        return piece;
    }
};

// The online softmax of some rows: sums of weighted values, sums of weights (lane by lane), the highest score.
struct State {
    float *acc, *total, *top;  // [rows, padded_dim], [rows, LANES], [rows]

    static size_t size(int rows, int padded) { return (size_t(rows) * (padded + LANES + 1) + 15) / 16 * 16; }
    State(float* memory, int rows, int padded)
        : acc(memory), total(acc + size_t(rows) * padded), top(total + size_t(rows) * LANES) {}
    void clear(int rows, int padded) {
        std::fill(acc, acc + size_t(rows) * (padded + LANES), 0.0f);
        std::fill(top, top + rows, -INFINITY);
    }
};

// What keys that came later add to `into`. Exact where one side saw nothing.
INLINE void merge(State into, const State& part, int rows, int padded) {
    for (int r = 0; r < rows; r++) {
        const float now = std::max(into.top[r], part.top[r]);
        const float base = now == -INFINITY ? 0.0f : now;
        const vec a = exp2_(splat(into.top[r] - base)), b = exp2_(splat(part.top[r] - base));
        for (int c = 0; c < padded; c += LANES) {
            float* to = into.acc + int64_t(r) * padded + c;
            store(to, load(to) * a + load(part.acc + int64_t(r) * padded + c) * b);
        }
        float* to = into.total + r * LANES;
        store(to, load(to) * a + load(part.total + r * LANES) * b);
        into.top[r] = now;
    }
}

// One row's scores of a tile become weights, of which only the keys from .. seen - 1 are not 0. Returns the factor for
// what the row has summed up before.
template <class W>
INLINE float soften(const float* scores, float scale, int from, int seen, W* weights, float* top, float* total) {
    vec s[NV];
    for (int v = 0; v < NV; v++) s[v] = load(scores + v * LANES) * scale;
    if (from > 0 || seen < TILE) {
        const ivec lane = lanes();
        for (int v = 0; v < NV; v++)
            s[v] = (uvec)(lane + (v * LANES - from)) < uint32_t(seen - from) ? s[v] : splat(-INFINITY);
    }
    vec high = s[0];
    for (int v = 1; v < NV; v++) high = high > s[v] ? high : s[v];
    const float now = std::max(*top, maximum(high));
    const float base = now == -INFINITY ? 0.0f : now;  // nothing seen yet: all weights become 0
    const float alpha = *top == base ? 1.0f : exp2_(splat(*top - base))[0];
    *top = now;
    vec part = {};
    for (int v = 0; v < NV; v++) {
        vec w = exp2_(s[v] - base);
        store(weights + v * LANES, w);
        part += w;
    }
    store(total, load(total) * alpha + part);
    return alpha;
}

// A line of the tile after this one. Into the second cache: two tiles of large heads are more than the first holds.
INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace
