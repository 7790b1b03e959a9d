// Rows of bfloat16 against a tile of keys with the matrix unit (AMX): up to 16 rows at a time, sums in float32.
//
// A right factor wants pairs of neighbours along the sum side by side. A paired cache (layout.h) has them so: its
// blocks are loaded as they lie, for a prompt as for a decode. Only the values beside keys that nobody wrote are masked
// in the workspace first, and plain caches are copied there. Weights are rounded to bfloat16 before they meet the
// values, their sum is not. Keys are met by groups of 16, which lie in one block; a group that no row of the 16 sees
// is left out, and would add exact zeros.
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
    static constexpr int BLOCK = 16, PAIRS = 16, K = 2 * PAIRS;  // rows; pairs and components of a chunk of a head
    static_assert(NV == 4 && LANES == 16);                       // a vector's keys are a group

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
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 32, 64};
        uint8_t rows[16] = {};
    };
    // Groups of a part, those that some row sees: component pair d of group v at key[v] + d * stride, [16 keys, 2];
    // its values at value[v], [8 pairs of keys, padded_dim, 2].
    struct Groups {
        int first = 0, last = 0;
        const bf16 *key[NV], *value[NV];
        int64_t stride;
    };

    const Problem& p;
    const Rows rows;
    const int padded, chunks, block;  // chunks of K components; rows of a block: 16, or all if there are fewer
    const bool copies_keys;
    bf16 *q, *weights, *key_copy = nullptr, *value_copy;
    float* scores;
    Groups groups;

    static int chunks_of(const Problem& p) { return (p.dim + K - 1) / K; }
    static int state_rows(int rows) { return rows <= BLOCK ? rows : (rows + BLOCK - 1) / BLOCK * BLOCK; }
    static bool lies_in_chunks(const Problem& p) { return p.layout.paired && p.dim % K == 0; }
    static size_t bytes(const Problem& p, const Rows& rows) {
        const size_t chunks = chunks_of(p), padded = p.padded_dim();
        return 2 * (state_rows(rows.count) * chunks * K + (lies_in_chunks(p) ? 0 : TILE * chunks * K) + TILE * padded) +
               6 * BLOCK * TILE + 64 * 5;
    }

    MatrixRows(const Problem& p, const Rows& rows, const bf16* queries, Arena& arena)
        : p(p), rows(rows), padded(p.padded_dim()), chunks(chunks_of(p)), block(std::min(BLOCK, rows.count)),
          copies_keys(!lies_in_chunks(p)) {
        const int count = state_rows(rows.count);
        q = arena.take<bf16>(size_t(count) * chunks * K);
        weights = arena.take<bf16>(BLOCK * TILE);
        scores = arena.take<float>(BLOCK * TILE);
        value_copy = arena.take<bf16>(size_t(TILE) * padded);
        if (copies_keys) {
            key_copy = arena.take<bf16>(size_t(TILE) * chunks * K);
            std::memset(key_copy, 0, size_t(TILE) * chunks * K * 2);
        }
        std::memset(q, 0, size_t(count) * chunks * K * 2);
        for (int row = 0; row < rows.count; row++) {
            const bf16* from = queries + row / rows.group * p.q_stride + int64_t(row % rows.group) * p.dim;
            bf16* to = q + (row / BLOCK) * int64_t(BLOCK) * chunks * K + row % BLOCK * K;  // [block, chunk, row, K]
            for (int c = 0; c < p.dim; c += K)
                std::memcpy(to + int64_t(c) * block, from + c, std::min(K, p.dim - c) * 2);
        }
        Shape shape;
        for (int t : {0, 1, 2, 3, 4, 6}) shape.rows[t] = block;  // sums; 4 queries; 6 weights of a group
        shape.rows[5] = PAIRS;                                   // keys of a group: a chunk of their components
        shape.rows[7] = LANES / 2;                               // values of a group: a vector of their components
        _tile_loadconfig(&shape);
    }

    void meet(State& state, const Part& part, const Part* following) {
        groups = p.layout.paired ? locate(p, part) : copy(part);
        const bool there = following && p.layout.paired;
        const Groups next = there ? locate(p, *following) : Groups{};
        if (p.layout.paired) mask(part, groups, value_copy, padded);
        if (copies_keys && p.layout.paired) copy_keys();
        for (int g = 0; g < rows.count; g += BLOCK) attend(state, part.start, g, g ? Groups{} : next);
    }

    static Groups locate(const Problem& p, const Part& part) {
        Groups found;
        const Item& item = *part.item;
        const int32_t* table = p.table + item.sequence * p.table_width;
        found.first = part.first / LANES;
        found.last = (part.last + LANES - 1) / LANES;
        found.stride = 2 * p.block_size;
        for (int v = found.first; v < found.last; v++) {
            const int at = part.start + v * LANES, block = at / p.block_size, offset = at % p.block_size;
            const int64_t base = (table[block] * int64_t(p.kv_heads) + item.kv_head) * p.layout.size();
            found.key[v] = static_cast<const bf16*>(p.k_cache) + base + p.layout.key(0, offset);
            found.value[v] = static_cast<const bf16*>(p.v_cache) + base + p.layout.value(offset, 0);
        }
        return found;
    }

    // Groups at the ends, of which nobody sees some keys: those values become zeros.
    static void mask(const Part& part, Groups& groups, bf16* value_copy, int padded) {
        for (int v = groups.first; v < groups.last; v++) {
            const int first = std::max(0, part.first - v * LANES), last = std::min(LANES, part.last - v * LANES);
            if (first == 0 && last == LANES) continue;
            bf16* to = value_copy + int64_t(v) * LANES * padded;
            for (int j = 0; j < LANES; j += 2) {
                const uint32_t low = j >= first && j < last ? 0xffff : 0;
                const uint32_t seen = low | (j + 1 >= first && j + 1 < last ? 0xffff0000 : 0);
                for (int c = 0; c < 2 * padded; c += 2 * LANES) {
                    uvec pair;
                    std::memcpy(&pair, groups.value[v] + j * padded + c, sizeof pair);
                    pair &= seen;
                    std::memcpy(to + j * padded + c, &pair, sizeof pair);
                }
            }
            groups.value[v] = to;
        }
    }

    // Heads that are no whole number of chunks.
    void copy_keys() {
        for (int v = groups.first; v < groups.last; v++) {
            for (int d = 0; d < p.dim / 2; d++)
                std::memcpy(key_copy + (d * NV + v) * K, groups.key[v] + d * groups.stride, K * 2);
            groups.key[v] = key_copy + v * K;
        }
        groups.stride = NV * K;
    }

    // A plain cache, of any head and block size.
    Groups copy(const Part& part) {
        Groups found;
        const Item& item = *part.item;
        const int32_t* table = p.table + item.sequence * p.table_width;
        found.first = part.first / LANES;
        found.last = (part.last + LANES - 1) / LANES;
        found.stride = NV * K;
        std::memset(value_copy, 0, size_t(TILE) * padded * 2);
        for (int j = part.first; j < part.last; j++) {
            const int block = (part.start + j) / p.block_size, offset = (part.start + j) % p.block_size;
            const int64_t base = (table[block] * int64_t(p.kv_heads) + item.kv_head) * p.layout.size();
            const bf16 *k = static_cast<const bf16*>(p.k_cache) + base, *v = static_cast<const bf16*>(p.v_cache) + base;
            for (int d = 0; d < p.dim; d++) {
                key_copy[(d / 2 * TILE + j) * 2 + d % 2] = k[p.layout.key(d, offset)];
                value_copy[(j / 2 * padded + d) * 2 + j % 2] = v[p.layout.value(offset, d)];
            }
        }
        for (int v = 0; v < NV; v++) {
            found.key[v] = key_copy + v * K;
            found.value[v] = value_copy + int64_t(v) * LANES * padded;
        }
        return found;
    }

    void attend(State& state, int start, int g, const Groups& next) {
        int from[BLOCK], seen[BLOCK], first = TILE, keys = 0;
        for (int r = 0; r < block; r++) {
            const int at = rows.at(g + r);
            seen[r] = std::clamp(at + 1 - start, 0, TILE);
            from[r] = std::clamp(p.lowest(at) - start, 0, seen[r]);
            if (from[r] == seen[r]) continue;
            first = std::min(first, from[r]);
            keys = std::max(keys, seen[r]);
        }
        if (first >= keys) return;
        const int lo = first / LANES, hi = (keys + LANES - 1) / LANES;
        score(q + int64_t(g) * chunks * K, lo, hi, next);
        for (int r = 0; r < block; r++) {
            const float alpha = soften(scores + r * TILE, p.scale * 1.44269504f, from[r], seen[r], weights + r * TILE,
                                       state.top + g + r, state.total + (g + r) * LANES);
            float* acc = state.acc + int64_t(g + r) * padded;
            if (alpha != 1.0f)
                for (int c = 0; c < padded; c += LANES) store(acc + c, load(acc + c) * alpha);
        }
        float* acc = state.acc + int64_t(g) * padded;
        int c = 0;
        for (; c + 4 * LANES <= padded; c += 4 * LANES) accumulate<4>(acc, c, lo, hi, next);
        for (; c < padded; c += LANES) accumulate<1>(acc, c, lo, hi, next);
    }

    // The lines that the same step will need of the next part.
    INLINE void fetch_lines(const Groups& next, const bf16* const (&at)[NV], int v, int64_t offset, int64_t stride,
                            int lines) {
        if (v < next.first || v >= next.last) return;
        for (int i = 0; i < lines; i++) fetch(at[v] + offset + i * stride);
    }

    void score(const bf16* left, int lo, int hi, const Groups& next) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const int64_t stride = groups.stride * 2;
        for (int c = 0; c < chunks; c++) {
            const int64_t at = c * PAIRS * groups.stride;
            _tile_loadd(4, left + c * block * K, 64);
#define MEET(v)                                                                      \
    fetch_lines(next, next.key, v, c * PAIRS * next.stride, next.stride, PAIRS);     \
    if (lo <= v && v < hi) {                                                         \
        _tile_loadd(5, groups.key[v] + at, stride);                                  \
        _tile_dpbf16ps(v, 4, 5);                                                     \
    }
            MEET(0)
            MEET(1)
            MEET(2)
            MEET(3)
#undef MEET
        }
        _tile_stored(0, scores, TILE * 4);
        _tile_stored(1, scores + LANES, TILE * 4);
        _tile_stored(2, scores + 2 * LANES, TILE * 4);
        _tile_stored(3, scores + 3 * LANES, TILE * 4);
    }

    // W vectors of components of a block of rows, from column c: acc += weights * values.
    template <int W>
    void accumulate(float* acc, int c, int lo, int hi, const Groups& next) {
        const int64_t width = padded * 4;
        acc += c;
        _tile_loadd(0, acc, width);
        if constexpr (W == 4) {
            _tile_loadd(1, acc + LANES, width);
            _tile_loadd(2, acc + 2 * LANES, width);
            _tile_loadd(3, acc + 3 * LANES, width);
        }
        const int64_t row = 2 * padded;
        for (int v = 0; v < NV; v++) {
            const auto fetch_next = [&](int w) {
                fetch_lines(next, next.value, v, 2 * (c + w * LANES), row, LANES / 2);
            };
            fetch_next(0);
            if (v < lo || v >= hi) {
                for (int w = 1; w < W; w++) fetch_next(w);
                continue;
            }
            const bf16* right = groups.value[v] + 2 * c;
            _tile_loadd(6, weights + v * LANES, TILE * 2);
            _tile_loadd(7, right, width);
            _tile_dpbf16ps(0, 6, 7);
            if constexpr (W == 4) {
                fetch_next(1);
                _tile_loadd(7, right + 2 * LANES, width);
                _tile_dpbf16ps(1, 6, 7);
                fetch_next(2);
                _tile_loadd(7, right + 4 * LANES, width);
                _tile_dpbf16ps(2, 6, 7);
                fetch_next(3);
                _tile_loadd(7, right + 6 * LANES, width);
                _tile_dpbf16ps(3, 6, 7);
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
