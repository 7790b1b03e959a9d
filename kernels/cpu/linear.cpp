// y = x W^T (+ bias) with the weight packed once: for the few rows of a decode step it reads the weight as fast as the
// memory gives it, for many rows it is a blocked matrix product.
//
// Layout: panels of LANES outputs, [outputs / LANES][inputs][LANES]; of bfloat16 two neighbouring inputs stand side by
// side, [outputs / LANES][inputs / 2][LANES][2], which is what the dot-product instruction and AMX's tiles take. Zeros
// fill the last panel, and the inputs up to a multiple of INPUT_PAD. `gated` packs panels of gate and up by turns and
// yields silu(gate) * up.
//
// Bits: an output is one chain of additions over the inputs in a fixed order, however many rows there are and whichever
// thread computes it. So a row's result depends on its own values alone.

#include <algorithm>
#include <cmath>
#include <vector>

#include <omp.h>
#if defined(__AMX_BF16__)
constexpr bool HAS_AMX = true;  // a library with it is only used where bm_supported says so
#else
constexpr bool HAS_AMX = false;
#if defined(__AVX512F__)
#include <cpuid.h>
#endif
#endif

#include "calls.h"
#include "simd.h"

namespace {

// Rows x panels in registers at once, of 32 registers or of 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MR = 6, NV = 4;
#else
constexpr int MR = 5, NV = 2;
#endif
constexpr int ROWS = 96;       // of x at a time: they stay in the second-level cache
constexpr int INPUTS = 640;    // of a panel at a time, likewise
constexpr int FEW = 2;         // rows up to which two streams of the weight are read faster than NV
constexpr int INPUT_PAD = 32;  // an AMX tile of bfloat16
constexpr int64_t WORTH_THREADS = 1 << 17;  // multiplications: a wake-up costs some 10 microseconds

// How products are formed: floats; bfloat16 widened to floats; pairs of bfloat16 by vdpbf16ps; tiles of them by AMX.
enum Way { FLOATS = 0, WIDEN = 1, DOT = 2, AMX = 3 };

INLINE int64_t padded_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
INLINE int64_t panels_of(int64_t outputs, bool gated) {
    return gated ? padded_to(outputs / 2, LANES) / LANES * 2 : padded_to(outputs, LANES) / LANES;
}

struct Product {
    const void *x, *weight, *bias;  // x: rows of `inputs` readable values
    void* out;
    int64_t x_stride, out_stride, rows, outputs, inputs;  // outputs: of the weight; gated: twice those of out
    bool gated;
    int64_t padded() const { return padded_to(inputs, INPUT_PAD); }
    int64_t panels() const { return panels_of(outputs, gated); }
};

struct Floats {
    using T = float;
    static constexpr int STEP = 1;  // inputs at a time
    template <int R, int V>
    static inline __attribute__((always_inline)) void step(const T* w, int64_t panel, const T* x, int64_t x_stride, vec a[R][V]) {
        vec b[V];
        for (int v = 0; v < V; v++) b[v] = load(w + v * panel);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) a[r][v] += x[r * x_stride] * b[v];
    }
};

INLINE uint32_t pair_of(const bf16* x) {
    uint32_t pair;
    std::memcpy(&pair, x, 4);
    return pair;
}
INLINE uvec pairs_of(const bf16* w) {
    uvec pairs;
    std::memcpy(&pairs, w, sizeof pairs);
    return pairs;
}

struct Widen {
    using T = bf16;
    static constexpr int STEP = 2;
    template <int R, int V>
    static inline __attribute__((always_inline)) void step(const T* w, int64_t panel, const T* x, int64_t x_stride, vec a[R][V]) {
        vec even[V], odd[V];
        for (int v = 0; v < V; v++) {
            const uvec pairs = pairs_of(w + v * panel);
            even[v] = (vec)(pairs << 16);
            odd[v] = (vec)(pairs & 0xffff0000u);
        }
        for (int r = 0; r < R; r++) {
            const uvec pair = pair_of(x + r * x_stride) - uvec{};
            for (int v = 0; v < V; v++) a[r][v] += (vec)(pair << 16) * even[v];
            for (int v = 0; v < V; v++) a[r][v] += (vec)(pair & 0xffff0000u) * odd[v];
        }
    }
};

#if defined(__AVX512F__) && !defined(__AMX_BF16__)
// Written as assembly: the library for AVX-512 serves processors with the instruction and without.
struct Dot {
    using T = bf16;
    static constexpr int STEP = 2;
    template <int R, int V>
    static inline __attribute__((always_inline)) void step(const T* w, int64_t panel, const T* x, int64_t x_stride, vec a[R][V]) {
        uvec b[V];
        for (int v = 0; v < V; v++) b[v] = pairs_of(w + v * panel);
        for (int r = 0; r < R; r++) {
            const uvec pair = pair_of(x + r * x_stride) - uvec{};
            for (int v = 0; v < V; v++) asm("vdpbf16ps %2, %1, %0" : "+v"(a[r][v]) : "v"(pair), "v"(b[v]));
        }
    }
};
#endif

// -- what becomes of the sums --

INLINE vec part_of(const float* p, int n) { return n == LANES ? load(p) : load_part(p, n); }
INLINE vec part_of(const bf16* p, int n) { return n == LANES ? load(p) : load_part(p, n); }

// One row of sums of the panel `p`; gated: `sums` is gate's, `up` the panel's after it.
template <class T>
INLINE void finish(const Product& q, int64_t row, int64_t p, vec sums, vec up) {
    int64_t column = p * LANES, columns = q.outputs;
    if (q.gated) {
        // Rounded as the separate operations would.
        sums = rounded(sums, T{});
        sums = sums / (exp2_(sums * -1.44269504f) + 1.0f) * rounded(up, T{});
        column /= 2;
        columns /= 2;
    }
    const int n = int(std::min<int64_t>(LANES, columns - column));
    if (q.bias) sums += part_of(static_cast<const T*>(q.bias) + column, n);
    T* to = static_cast<T*>(q.out) + row * q.out_stride + column;
    n == LANES ? store(to, sums) : store_part(to, sums, n);
}

template <class T>
__attribute__((noinline)) void finish_apart(const Product& q, int64_t row, int64_t p, vec sums, vec up) {
    finish<T>(q, row, p, sums, up);
}

// -- products in registers --

// The part of a weight that stays in the second-level cache while all rows meet it, and what comes after it.
struct Block {
    int64_t panel, k0, k1;  // V panels from `panel`, the inputs k0 .. k1 - 1
    int64_t next;           // elements from here to the following block; 0: there is none
};

// R rows of a block. Sums that began in an earlier block wait in `kept`, [R][NV] vectors. Meanwhile `fetch` panels of
// the next block, from fetch_first on, are brought into the cache.
template <class M, int R, int V>
INLINE void multiply(const Product& q, const Block& b, int64_t row, float* kept, int fetch_first, int fetch) {
    using T = typename M::T;
    const int64_t panel = q.padded() * LANES;
    const T* x = static_cast<const T*>(q.x) + row * q.x_stride;
    const T* w = static_cast<const T*>(q.weight) + b.panel * panel;
    const T* ahead = w + b.next + fetch_first * panel;
    vec a[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) a[r][v] = b.k0 ? load(kept + (r * NV + v) * LANES) : vec{};
    for (int64_t k = b.k0; k < b.k1; k += M::STEP) {
        for (int v = 0; v < fetch; v++) __builtin_prefetch(ahead + v * panel + k * LANES, 0, 2);
        M::template step<R, V>(w + k * LANES, panel, x + k, q.x_stride, a);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            if (b.k1 < q.inputs)
                store(kept + (r * NV + v) * LANES, a[r][v]);
            else if (!q.gated)
                finish_apart<T>(q, row + r, b.panel + v, a[r][v], vec{});
            else if (v % 2 == 0)
                finish_apart<T>(q, row + r, b.panel + v, a[r][v], a[r][std::min(v + 1, V - 1)]);
        }
}

template <class M, int V>
void multiply_rows(const Product& q, const Block& b, int64_t row, int64_t rows, float* kept) {
    const int groups = int((rows + MR - 1) / MR), share = (V + groups - 1) / groups;
    for (int g = 0; g < groups; g++, kept += MR * NV * LANES) {
        const int64_t first = row + rows * g / groups, count = row + rows * (g + 1) / groups - first;
        const int from = std::min(V, g * share), fetch = b.next ? std::min(V - from, share) : 0;
        switch (count) {
            case 1: multiply<M, 1, V>(q, b, first, kept, from, fetch); break;
            case 2: multiply<M, 2, V>(q, b, first, kept, from, fetch); break;
            case 3: multiply<M, 3, V>(q, b, first, kept, from, fetch); break;
            case 4: multiply<M, 4, V>(q, b, first, kept, from, fetch); break;
            case 5: multiply<M, 5, V>(q, b, first, kept, from, fetch); break;
            default: multiply<M, MR, V>(q, b, first, kept, from, fetch);
        }
    }
}

// The panels first .. last - 1 for all rows.
template <class M>
void run_registers(const Product& q, int64_t first, int64_t last) {
    alignas(64) float kept[(ROWS + MR) * NV * LANES];
    const int64_t cuts = std::max<int64_t>(1, (q.inputs + INPUTS / 2) / INPUTS);
    const int64_t step = ((q.inputs + cuts - 1) / cuts + 1) / 2 * 2;
    for (int64_t row = 0; row < q.rows; row += ROWS) {
        const int64_t rows = std::min<int64_t>(ROWS, q.rows - row);
        for (int64_t p = first, width; p < last; p += width) {
            width = last - p >= NV && rows > FEW ? NV : std::min<int64_t>(2, last - p);
            for (int64_t k = 0; k < q.inputs; k += step) {
                const int64_t end = std::min(k + step, q.inputs);
                Block b{p, k, end, 0};
                if (end < q.inputs) b.next = (end - k) * LANES;
                else if (p + 2 * width <= last) b.next = (width * q.padded() - k) * LANES;
                switch (width) {
                    case 1: multiply_rows<M, 1>(q, b, row, rows, kept); break;
                    case 2: multiply_rows<M, 2>(q, b, row, rows, kept); break;
                    default: multiply_rows<M, NV>(q, b, row, rows, kept);
                }
            }
        }
    }
}

// -- products in AMX's tiles --

#if defined(__AMX_BF16__)
constexpr int TILE = 16;  // rows, panel width, and pairs of inputs of a tile

constexpr int FETCH = 2048;  // elements ahead in the weight: 4 KiB
struct TileShape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3 hold sums (rows a, a, b, b x panels), 4 and 5 rows of x, 6 and 7 panels of the weight.
INLINE void shape_tiles(int64_t a, int64_t b) {
    TileShape shape;
    const uint8_t rows[8] = {uint8_t(a), uint8_t(a), uint8_t(b), uint8_t(b), uint8_t(a), uint8_t(b), TILE, TILE};
    for (int t = 0; t < 8; t++) shape.rows[t] = rows[t], shape.row_bytes[t] = rows[t] ? 64 : 0;
    asm volatile("ldtilecfg %0" ::"m"(shape));
}
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, p, stride) asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"(stride) : "memory")
#define TILE_STORE(t, p) asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"(int64_t(64)) : "memory")
#define TILE_DOT(sum, x, w) asm volatile("tdpbf16ps %%tmm" #w ", %%tmm" #x ", %%tmm" #sum ::)

INLINE void fetch_tile(const bf16* w) {
    for (int line = 0; line < TILE; line++) __builtin_prefetch(w + line * 2 * LANES, 0, 2);
}

// Sums of up to 2 x TILE rows and two panels, stored from the tiles. What was just stored so can be read only after a
// wait: the rows are finished between the steps of the product that comes next.
struct Leaving {
    alignas(64) float sums[4][TILE * LANES];  // rows a, a, b, b x panels
    int64_t row, panel;
    int rows = 0, next = 0;  // rows, and how many of them are finished
    bool two;

    __attribute__((always_inline)) inline void finish_rows(const Product& q, int most) {
        for (const int end = std::min(rows, next + most); next < end; next++) {
            const float* from = sums[next / TILE * 2] + next % TILE * LANES;
            const vec one = load(from), other = load(from + TILE * LANES);
            finish<bf16>(q, row + next, panel, one, other);
            if (two && !q.gated) finish<bf16>(q, row + next, panel + 1, other, other);
        }
    }
};

// Rows row .. row + a - 1 and, with B, the b rows after them, x the panels p and, with TWO, p + 1. The sums go to `now`.
template <bool B, bool TWO>
INLINE void multiply_tiles(const Product& q, const bf16* x, int64_t row, int64_t a, int64_t b, int64_t p, int64_t panel,
                           bool first_rows, Leaving& now, Leaving& before) {
    const bf16 *w = static_cast<const bf16*>(q.weight) + p * panel, *x2 = x + TILE * q.x_stride;
    const int64_t x_bytes = q.x_stride * 2, w_bytes = 64, steps = panel / LANES / INPUT_PAD;
    const int share = int((before.rows + steps - 1) / steps);
    TILE_ZERO(0);
    if (TWO) TILE_ZERO(1);
    if (B) TILE_ZERO(2);
    if (B && TWO) TILE_ZERO(3);
    for (int64_t k = 0; k < steps; k++, x += INPUT_PAD, x2 += INPUT_PAD, w += INPUT_PAD * LANES) {
        if (first_rows) {  // the weight comes from memory, and tile loads alone do not fetch far enough ahead
            fetch_tile(w + FETCH);
            if (TWO) fetch_tile(w + panel + FETCH);
        }
        TILE_LOAD(4, x, x_bytes);
        TILE_LOAD(6, w, w_bytes);
        TILE_DOT(0, 4, 6);
        if (TWO) {
            TILE_LOAD(7, w + panel, w_bytes);
            TILE_DOT(1, 4, 7);
        }
        if (B) {
            TILE_LOAD(5, x2, x_bytes);
            TILE_DOT(2, 5, 6);
            if (TWO) TILE_DOT(3, 5, 7);
        }
        before.finish_rows(q, share);
    }
    TILE_STORE(0, now.sums[0]);
    if (TWO) TILE_STORE(1, now.sums[1]);
    if (B) TILE_STORE(2, now.sums[2]);
    if (B && TWO) TILE_STORE(3, now.sums[3]);
    now.row = row, now.panel = p, now.rows = int(a + b), now.next = 0, now.two = TWO;
}

constexpr int AMX_ROWS = 256;  // of x at a time: they stay in the second-level cache

void run_tiles(const Product& given, int64_t first, int64_t last) {
    const int64_t padded = given.padded(), panel = padded * LANES;
    Product q = given;
    std::vector<bf16> copy;
    if (padded != q.inputs) {  // tiles read whole: zeros after the last input
        copy.assign(size_t(q.rows * padded), bf16{});
        for (int64_t r = 0; r < q.rows; r++)
            std::memcpy(copy.data() + r * padded, static_cast<const bf16*>(q.x) + r * q.x_stride, q.inputs * 2);
        q.x = copy.data();
        q.x_stride = padded;
    }
    int64_t shaped_a = 0, shaped_b = 0;
    Leaving leaving[2];
    int turn = 0;
    for (int64_t block = 0; block < q.rows; block += AMX_ROWS)
        for (int64_t p = first; p < last; p += 2)
            for (int64_t row = block; row < std::min(block + AMX_ROWS, q.rows); row += 2 * TILE) {
                const int64_t a = std::min<int64_t>(TILE, q.rows - row);
                const int64_t b = std::min<int64_t>(TILE, q.rows - row - a);
                const bf16* x = static_cast<const bf16*>(q.x) + row * q.x_stride;
                if (a != shaped_a || b != shaped_b) shape_tiles(a, b), shaped_a = a, shaped_b = b;
                const bool two = p + 1 < last, first_rows = row == block && p + 3 < last;
                Leaving &now = leaving[turn], &before = leaving[1 - turn];
                turn = 1 - turn;
                if (b && two) multiply_tiles<true, true>(q, x, row, a, b, p, panel, first_rows, now, before);
                else if (b) multiply_tiles<true, false>(q, x, row, a, b, p, panel, false, now, before);
                else if (two) multiply_tiles<false, true>(q, x, row, a, b, p, panel, first_rows, now, before);
                else multiply_tiles<false, false>(q, x, row, a, b, p, panel, false, now, before);
            }
    leaving[1 - turn].finish_rows(q, 2 * TILE);
    asm volatile("tilerelease" ::);
}

#endif

bool dot_runs() {
#if defined(__AVX512F__) && !defined(__AMX_BF16__)
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);
#else
    return false;
#endif
}

void run(Way way, const Product& q, int64_t first, int64_t last) {
    if (first >= last) return;
    switch (way) {
        case FLOATS: run_registers<Floats>(q, first, last); break;
#if defined(__AMX_BF16__)
        case AMX: run_tiles(q, first, last); break;
#elif defined(__AVX512F__)
        case DOT: run_registers<Dot>(q, first, last); break;
#endif
        default: run_registers<Widen>(q, first, last);
    }
}

template <class T>
void pack(const T* weight, int64_t outputs, int64_t inputs, bool gated, T* to) {
    constexpr int PAIR = sizeof(T) == 4 ? 1 : 2;
    const int64_t padded = padded_to(inputs, INPUT_PAD), half = outputs / 2;
    for (int64_t p = 0; p < panels_of(outputs, gated); p++, to += padded * LANES)
        for (int l = 0; l < LANES; l++) {
            const int64_t row = gated ? p / 2 * LANES + l : p * LANES + l;
            const bool there = row < (gated ? half : outputs);
            const T* from = weight + (gated && p % 2 ? half + row : row) * inputs;
            for (int64_t k = 0; k < padded; k++)
                to[(k / PAIR * LANES + l) * PAIR + k % PAIR] = there && k < inputs ? from[k] : T{};
        }
}

}  // namespace

extern "C" {

// The fastest way that this machine has for the type. A bfloat16 weight may be multiplied in a slower one as well.
int bm_linear_way(int is_bf16) { return !is_bf16 ? FLOATS : HAS_AMX ? AMX : dot_runs() ? DOT : WIDEN; }

// Elements of the packed weight.
int64_t bm_linear_size(int64_t outputs, int64_t inputs, int gated) {
    return panels_of(outputs, gated) * LANES * padded_to(inputs, INPUT_PAD);
}

int bm_linear_pack(int is_bf16, const void* weight, int64_t outputs, int64_t inputs, int gated, void* packed) {
    if (is_bf16)
        pack(static_cast<const bf16*>(weight), outputs, inputs, gated, static_cast<bf16*>(packed));
    else
        pack(static_cast<const float*>(weight), outputs, inputs, gated, static_cast<float*>(packed));
    return 0;
}

int bm_linear(int way, const void* x, int64_t x_stride, const void* packed, const void* bias, void* out,
              int64_t out_stride, int64_t rows, int64_t outputs, int64_t inputs, int32_t gated, int32_t threads) {
    const Product q{x, packed, bias, out, x_stride, out_stride, rows, outputs, inputs, bool(gated)};
    const int64_t unit = gated ? 2 : 1, units = q.panels() / unit;
    if (threads <= 1 || rows * outputs * inputs < WORTH_THREADS) {
        run(Way(way), q, 0, q.panels());
        return 0;
    }
#pragma omp parallel num_threads(threads)
    {
        const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
        run(Way(way), q, units * me / team * unit, units * (me + 1) / team * unit);
    }
    return 0;
}
}
