// Causal paged attention over a ragged batch, and the write of new keys and values into the cache.
//
// Layout (kernels/interface.py): k_cache [N, Hk, D, bs], v_cache [N, Hk, bs, D]. A row of work is one (query, head);
// the heads that share a key/value head are packed as neighbouring rows. Work items are (sequence, key/value head,
// block of queries), taken largest first from an atomic counter.
//
// Bits: each row meets the keys in tiles of TILE that start at position 0, with an online softmax in float32 (Milakov
// and Gimelshein 2018; FlashAttention, Dao et al. 2022). Rows are computed MR at a time and the last group is padded,
// so every row takes the same instructions: its result depends neither on its neighbours, nor on how its prompt was
// cut, nor on the number of threads. A masked key has weight exactly 0, and its value is only multiplied where another
// row of the group sees it. Slots that nobody wrote and blocks below every row's window are never used.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <vector>

#include "simd.h"

namespace {

constexpr int MR = 4;     // rows in registers
constexpr int TILE = 64;  // keys
constexpr int NV = TILE / LANES;
constexpr int ROWS = 64;  // rows of a work item: its keys stay in the first-level cache meanwhile
// Vectors of keys or components in registers at once: MR * STEP accumulators, of 32 registers or of 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int STEP = 4;
#else
constexpr int STEP = 2;
#endif

enum Status { OK = 0, BAD_CU_Q = 1, BAD_BLOCK = 2, NO_MEMORY = 3, BAD_SLOT = 4, BAD_LENGTH = 6 };

struct Problem {
    const void *q, *k_cache, *v_cache;
    void* out;
    int64_t q_stride, out_stride, table_width;
    const int32_t *cu_q, *kv_len, *table;
    int heads, kv_heads, dim, block_size;
    float scale;
    int window;  // 0: none
    int group() const { return heads / kv_heads; }
    int padded_dim() const { return (dim + LANES - 1) / LANES * LANES; }
    // The first key that a query at this position sees.
    int lowest(int position) const { return window && position >= window ? position - window + 1 : 0; }
};

struct Item {
    int64_t cost;
    int32_t sequence, kv_head, first, count;  // queries first .. first + count - 1 of the sequence
};

// One thread's workspace, kept from call to call.
struct Scratch {
    std::vector<char> memory;
    float *q, *acc, *top, *total, *keys, *values, *weights;
    const float* value_row[TILE];

    void reserve(int rows, int dim, int padded_dim) {
        size_t sizes[] = {size_t(rows) * dim,  size_t(rows) * padded_dim, size_t(rows), size_t(rows) * LANES,
                          size_t(TILE) * dim, size_t(TILE) * padded_dim, size_t(MR) * TILE};
        float** parts[] = {&q, &acc, &top, &total, &keys, &values, &weights};
        size_t bytes = 64;
        for (size_t n : sizes) bytes += (n * sizeof(float) + 63) / 64 * 64;
        if (memory.size() < bytes) memory.assign(bytes, 0);
        char* p = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
        for (int i = 0; i < 7; i++) {
            *parts[i] = reinterpret_cast<float*>(p);
            p += (sizes[i] * sizeof(float) + 63) / 64 * 64;
        }
    }
};

// MR rows of scores against NV vectors of keys. q is [dim][MR]; component d of vector v is at keys[v] + d * stride.
INLINE void score(const float* q, const float* const keys[NV], int64_t stride, int dim, vec s[MR][NV]) {
    for (int v0 = 0; v0 < NV; v0 += STEP) {
        vec a[MR][STEP] = {};
        for (int d = 0; d < dim; d++)
            for (int v = 0; v < STEP; v++) {
                vec k = load(keys[v0 + v] + d * stride);
                for (int r = 0; r < MR; r++) a[r][v] += q[d * MR + r] * k;
            }
        for (int r = 0; r < MR; r++)
            for (int v = 0; v < STEP; v++) s[r][v0 + v] = a[r][v];
    }
}

// acc = acc * alpha + weights * values for W vectors of components from column c.
template <int W>
INLINE void accumulate(float* acc, int64_t stride, const float* alpha, const float* weights,
                       const float* const* value_row, int c, int first, int keys) {
    vec a[MR][W];
    for (int r = 0; r < MR; r++)
        for (int w = 0; w < W; w++) a[r][w] = load(acc + r * stride + c + w * LANES) * alpha[r];
    for (int j = first; j < keys; j++) {
        vec x[W];
        for (int w = 0; w < W; w++) x[w] = load(value_row[j] + c + w * LANES);
        for (int r = 0; r < MR; r++)
            for (int w = 0; w < W; w++) a[r][w] += weights[r * TILE + j] * x[w];
    }
    for (int r = 0; r < MR; r++)
        for (int w = 0; w < W; w++) store(acc + r * stride + c + w * LANES, a[r][w]);
}

template <class T>
struct Tile {
    const Problem& p;
    Scratch& scratch;
    const float* key_vec[NV];
    int64_t key_stride;

    // Float caches whose vectors lie inside a block are read in place, all others are gathered into the workspace.
    static bool keys_in_place(const Problem& p) { return sizeof(T) == 4 && p.block_size % LANES == 0; }
    static bool values_in_place(const Problem& p) { return sizeof(T) == 4 && p.dim % LANES == 0; }

    // The keys first .. keys - 1 of the tile that begins at position start.
    void locate(const int32_t* table, int kv_head, int start, int first, int keys) {
        const T* k_cache = static_cast<const T*>(p.k_cache);
        const T* v_cache = static_cast<const T*>(p.v_cache);
        const int bs = p.block_size, dim = p.dim, padded = p.padded_dim();
        const int64_t head_size = int64_t(dim) * bs, block_stride = head_size * p.kv_heads;
        if (!keys_in_place(p)) {
            key_stride = TILE;
            for (int v = 0; v < NV; v++) key_vec[v] = scratch.keys + v * LANES;
        }
        for (int j = first; j < keys;) {
            const int block = (start + j) / bs, offset = (start + j) % bs;
            const int n = std::min(bs - offset, keys - j);
            const int64_t base = table[block] * block_stride + kv_head * head_size;
            if (keys_in_place(p)) {
                key_stride = bs;
                for (int v = j / LANES; v * LANES < j + n; v++)
                    key_vec[v] = reinterpret_cast<const float*>(k_cache + base + offset + v * LANES - j);
            } else {
                for (int d = 0; d < dim; d++) {
                    const T* from = k_cache + base + int64_t(d) * bs + offset;
                    float* to = scratch.keys + d * TILE + j;
                    for (int i = 0; i < n; i++) to[i] = widen(from[i]);
                }
            }
            const T* from = v_cache + base + int64_t(offset) * dim;
            for (int i = 0; i < n; i++, from += dim) {
                if (values_in_place(p)) {
                    scratch.value_row[j + i] = reinterpret_cast<const float*>(from);
                } else {
                    float* to = scratch.values + (j + i) * padded;
                    for (int d = 0; d < dim; d++) to[d] = widen(from[d]);
                    scratch.value_row[j + i] = to;
                }
            }
            j += n;
        }
        // Vectors before the first and past the last key: any readable address, their scores are masked.
        if (keys_in_place(p)) {
            const int begin = first / LANES, end = (keys + LANES - 1) / LANES;
            for (int v = 0; v < NV; v++)
                if (v < begin || v >= end) key_vec[v] = key_vec[begin];
        }
    }
};

// One tile of keys for MR rows. Row r sees the keys from[r] .. seen[r] - 1 of the tile.
INLINE void attend(const float* q, const float* const key_vec[NV], int64_t key_stride, Scratch& scratch, int dim,
                   int padded, const int from[MR], const int seen[MR], float* acc, float* top, float* total) {
    vec s[MR][NV];
    score(q, key_vec, key_stride, dim, s);
    const ivec lane = lanes();
    float base[MR];
    vec change = {};
    int first = TILE, keys = 0;
    for (int r = 0; r < MR; r++) {
        for (int v = 0; v < NV; v++) {
            const ivec key = lane + v * LANES;
            s[r][v] = (uvec)(key - from[r]) < uint32_t(seen[r] - from[r]) ? s[r][v] : splat(-INFINITY);
        }
        vec high = s[r][0];
        for (int v = 1; v < NV; v++) high = high > s[r][v] ? high : s[r][v];
        const float now = std::max(top[r], maximum(high));
        base[r] = now == -INFINITY ? 0.0f : now;  // nothing seen yet: all weights become 0
        change[r] = top[r] - base[r];
        top[r] = now;
        if (from[r] < seen[r]) {
            first = std::min(first, from[r]);
            keys = std::max(keys, seen[r]);
        }
    }
    static_assert(MR <= LANES);
    float alpha[LANES];
    store(alpha, exp2_(change));
    for (int r = 0; r < MR; r++) {
        vec part = {};
        for (int v = 0; v < NV; v++) {
            vec w = exp2_(s[r][v] - base[r]);
            store(scratch.weights + r * TILE + v * LANES, w);
            part += w;
        }
        store(total + r * LANES, load(total + r * LANES) * alpha[r] + part);
    }
    const float* const* rows = scratch.value_row;
    int c = 0;
    for (; c + STEP * LANES <= padded; c += STEP * LANES)
        accumulate<STEP>(acc, padded, alpha, scratch.weights, rows, c, first, keys);
    switch ((padded - c) / LANES) {
        case 3: accumulate<3>(acc, padded, alpha, scratch.weights, rows, c, first, keys); break;
        case 2: accumulate<2>(acc, padded, alpha, scratch.weights, rows, c, first, keys); break;
        case 1: accumulate<1>(acc, padded, alpha, scratch.weights, rows, c, first, keys); break;
    }
}

template <class T>
void run_item(const Problem& p, const Item& item, Scratch& scratch) {
    const int group = p.group(), dim = p.dim, padded = p.padded_dim();
    const int rows = item.count * group, groups = (rows + MR - 1) / MR;
    scratch.reserve(groups * MR, dim, padded);

    const int32_t begin = p.cu_q[item.sequence], length = p.kv_len[item.sequence];
    const int position = length - (p.cu_q[item.sequence + 1] - begin) + item.first;  // of the first query
    const float scale = p.scale * 1.44269504f;                                       // weights are powers of 2
    for (int row = 0; row < groups * MR; row++) {
        float* to = scratch.q + (row / MR) * MR * dim + row % MR;
        const T* from = row >= rows ? nullptr
                                    : static_cast<const T*>(p.q) + (begin + item.first + row / group) * p.q_stride +
                                          int64_t(item.kv_head * group + row % group) * dim;
        for (int d = 0; d < dim; d++) to[d * MR] = from ? widen(from[d]) * scale : 0.0f;
        scratch.top[row] = -INFINITY;
    }
    std::fill(scratch.acc, scratch.acc + size_t(groups) * MR * padded, 0.0f);
    std::fill(scratch.total, scratch.total + size_t(groups) * MR * LANES, 0.0f);

    const int32_t* table = p.table + item.sequence * p.table_width;
    const int end = position + item.count;  // keys that the last query sees
    Tile<T> tile{p, scratch, {}, 0};
    const int lowest = p.lowest(position);
    for (int start = lowest / TILE * TILE; start < end; start += TILE) {
        tile.locate(table, item.kv_head, start, std::max(0, lowest - start), std::min(TILE, end - start));
        for (int g = 0; g < groups; g++) {
            int from[MR], seen[MR];
            bool any = false;
            for (int r = 0; r < MR; r++) {
                const int at = position + std::min(g * MR + r, rows - 1) / group;
                seen[r] = std::clamp(at + 1 - start, 0, TILE);
                from[r] = std::clamp(p.lowest(at) - start, 0, seen[r]);
                any |= from[r] < seen[r];
            }
            if (any)
                attend(scratch.q + g * MR * dim, tile.key_vec, tile.key_stride, scratch, dim, padded, from, seen,
                       scratch.acc + int64_t(g) * MR * padded, scratch.top + g * MR, scratch.total + g * MR * LANES);
        }
    }
    for (int row = 0; row < rows; row++) {
        const float total = sum(load(scratch.total + row * LANES));
        const float inverse = total == 0 ? 0.0f : 1.0f / total;
        T* to = static_cast<T*>(p.out) + (begin + item.first + row / group) * p.out_stride +
                int64_t(item.kv_head * group + row % group) * dim;
        const float* from = scratch.acc + int64_t(row) * padded;
        for (int c = 0; c < dim; c += LANES) store_part(to + c, load(from + c) * inverse, std::min(LANES, dim - c));
    }
}

template <class T>
void work(const Problem& p, const std::vector<Item>& items, std::atomic<size_t>& next) {
    thread_local Scratch scratch;
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items.size();)
        run_item<T>(p, items[i], scratch);
}

template <class T>
void run(const Problem& p, const std::vector<Item>& items, int threads) {
    std::atomic<size_t> next{0};
    if (threads <= 1) {
        work<T>(p, items, next);
        return;
    }
#pragma omp parallel num_threads(threads)
    work<T>(p, items, next);
}

template <class T>
int write(const T* k, int64_t k_stride, const T* v, int64_t v_stride, T* k_cache, T* v_cache, const int64_t* slot,
          int64_t tokens, int heads, int dim, int bs) {
    for (int64_t t = 0; t < tokens; t++) {
        if (slot[t] < 0) continue;
        const int64_t block = slot[t] / bs, offset = slot[t] % bs;
        for (int h = 0; h < heads; h++) {
            const int64_t base = (block * heads + h) * dim * bs;
            for (int d = 0; d < dim; d++) k_cache[base + int64_t(d) * bs + offset] = k[t * k_stride + h * dim + d];
            std::memcpy(v_cache + base + offset * dim, v + t * v_stride + h * dim, dim * sizeof(T));
        }
    }
    return OK;
}

}  // namespace

extern "C" {

// Strides in elements. is_bf16: q, caches and out are bfloat16, else float32. Returns a Status.
int bm_paged_attention(int is_bf16, const void* q, int64_t q_stride, const void* k_cache, const void* v_cache,
                       const int32_t* cu_q, const int32_t* kv_len, const int32_t* table, int32_t table_width,
                       void* out, int64_t out_stride, int32_t tokens, int32_t sequences,
                       int32_t heads, int32_t kv_heads, int32_t dim, int32_t block_size, int32_t num_blocks,
                       float scale, int32_t window, int32_t threads) {
    Problem p{q,   k_cache, v_cache, out,   q_stride, out_stride, table_width, cu_q,
              kv_len, table, heads,   kv_heads, dim,  block_size, scale, window};
    if (cu_q[0] != 0 || cu_q[sequences] != tokens) return BAD_CU_Q;
    try {
        std::vector<Item> items;
        const int step = std::max(1, ROWS / p.group());
        int64_t cost = 0;
        for (int s = 0; s < sequences; s++) {
            const int queries = cu_q[s + 1] - cu_q[s];
            if (queries < 0) return BAD_CU_Q;
            if (kv_len[s] < 0) return BAD_LENGTH;
            if (queries == 0) continue;
            const int64_t blocks = (int64_t(kv_len[s]) + block_size - 1) / block_size;
            if (blocks > table_width) return BAD_BLOCK;
            for (int64_t b = p.lowest(kv_len[s] - queries) / block_size; b < blocks; b++)
                if (uint32_t(table[int64_t(s) * table_width + b]) >= uint32_t(num_blocks)) return BAD_BLOCK;
            for (int first = 0; first < queries; first += step) {
                const int count = std::min(step, queries - first);
                const int position = kv_len[s] - queries + first;
                const int64_t keys = std::max(1, position + count - p.lowest(position));
                for (int h = 0; h < kv_heads; h++) {
                    items.push_back({keys * ((count * p.group() + MR - 1) / MR), s, h, first, count});
                    cost += items.back().cost;
                }
            }
        }
        // Waking threads costs about as long as this many key visits.
        if (cost < 4096 || items.size() < 2) threads = 1;
        if (threads > 1)
            std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
        is_bf16 ? run<bf16>(p, items, threads) : run<float>(p, items, threads);
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
    return OK;
}

int bm_write_kv(int is_bf16, const void* k, int64_t k_stride, const void* v, int64_t v_stride, void* k_cache,
                void* v_cache, const int64_t* slot, int64_t tokens, int32_t kv_heads, int32_t dim, int32_t block_size,
                int64_t num_blocks) {
    for (int64_t t = 0; t < tokens; t++)
        if (slot[t] >= num_blocks * block_size) return BAD_SLOT;
    if (is_bf16)
        return write(static_cast<const bf16*>(k), k_stride, static_cast<const bf16*>(v), v_stride,
                     static_cast<bf16*>(k_cache), static_cast<bf16*>(v_cache), slot, tokens, kv_heads, dim, block_size);
    return write(static_cast<const float*>(k), k_stride, static_cast<const float*>(v), v_stride,
                 static_cast<float*>(k_cache), static_cast<float*>(v_cache), slot, tokens, kv_heads, dim, block_size);
}
}
