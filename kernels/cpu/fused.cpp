// The operations between the matrix products, row by row: RMSNorm (with residual), rotary embedding with the write of
// the cache, SiLU-and-multiply, the largest logit. Each row is computed by one thread in a fixed order, so its bits
// depend on nothing else.

#include <algorithm>
#include <cmath>

#include "calls.h"
#include "layout.h"
#include "simd.h"

namespace {

// Threads are woken only for enough elements: a wake-up costs some 10 microseconds.
constexpr int64_t WORTH_THREADS = 1 << 15;

template <class F>
void for_rows(int64_t rows, int64_t elements, int threads, F f) {
    if (threads <= 1 || rows < 2 || rows * elements < WORTH_THREADS) {
        for (int64_t i = 0; i < rows; i++) f(i);
        return;
    }
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < rows; i++) f(i);
}

// Calls f(offset, count) over a row: whole vectors, then the padded rest.
template <class F>
INLINE void for_vectors(int n, F f) {
    int c = 0;
    for (; c + LANES <= n; c += LANES) f(c, LANES);
    if (c < n) f(c, n - c);
}
template <class T>
INLINE vec get(const T* p, int count) {
    return count == LANES ? load(p) : load_part(p, count);
}
template <class T>
INLINE void put(T* p, vec x, int count) {
    count == LANES ? store(p, x) : store_part(p, x, count);
}

template <class T>
void norm_row(const T* x, T* residual, const T* weight, T* out, int n, float eps) {
    vec squares = {};
    const T* from = residual ? residual : x;
    for_vectors(n, [&](int c, int count) {
        vec value = get(x + c, count);
        if (residual) {
            value = rounded(value + get(residual + c, count), T{});
            put(residual + c, value, count);
        }
        squares += value * value;
    });
    const float inverse = 1.0f / std::sqrt(sum(squares) / n + eps);
    for_vectors(n, [&](int c, int count) {
        vec normed = rounded(get(from + c, count) * inverse, T{});
        put(out + c, normed * get(weight + c, count), count);
    });
}

template <class T>
void rotate(T* x, const float* cos, const float* sin, int dim) {
    const int half = dim / 2;
    for_vectors(half, [&](int c, int count) {
        vec a = get(x + c, count), b = get(x + half + c, count);
        vec low = a * get(cos + c, count) - b * get(sin + c, count);
        vec high = b * get(cos + half + c, count) + a * get(sin + half + c, count);
        put(x + c, low, count);
        put(x + half + c, high, count);
    });
}

template <class T>
void rope_write(T* q, int64_t q_stride, T* k, int64_t k_stride, const T* v, int64_t v_stride, const float* cos,
                const float* sin, const int64_t* positions, T* k_cache, T* v_cache, const int64_t* slot, int64_t tokens,
                int heads, int kv_heads, const Layout& layout, int threads) {
    const int dim = layout.dim, bs = layout.block_size;
    // A token's keys and values go into lines of memory that no cache holds, each component into another one.
    const int64_t elements = int64_t(heads + 7 * kv_heads) * dim;
    for_rows(tokens, elements, threads, [=](int64_t t) {
        const float *c = cos + positions[t] * dim, *s = sin + positions[t] * dim;
        for (int h = 0; h < heads; h++) rotate(q + t * q_stride + h * dim, c, s, dim);
        for (int h = 0; h < kv_heads; h++) {
            T* key = k + t * k_stride + h * dim;
            rotate(key, c, s, dim);
            if (slot[t] < 0) continue;
            const int64_t base = (slot[t] / bs * kv_heads + h) * layout.size();
            layout.put(key, v + t * v_stride + h * dim, int(slot[t] % bs), k_cache + base, v_cache + base);
        }
    });
}

template <class T>
void silu_mul(const T* gate_up, int64_t stride, T* out, int64_t rows, int n, int threads) {
    for_rows(rows, n, threads, [=](int64_t i) {
        const T *gate = gate_up + i * stride, *up = gate + n;
        T* to = out + i * n;
        for_vectors(n, [=](int c, int count) {
            vec g = get(gate + c, count);
            vec activated = g / (exp2_(g * -1.44269504f) + 1.0f);
            put(to + c, activated * get(up + c, count), count);
        });
    });
}

// Whether any lane is set.
INLINE bool any(ivec x) {
    int32_t all = 0;
    for (int l = 0; l < LANES; l++) all |= x[l];
    return all;
}

// The place of the first of the highest, or of the first NaN.
template <class T>
int64_t argmax_row(const T* x, int64_t n) {
    constexpr int64_t MANY = 8 * LANES;
    const int64_t whole = n / MANY * MANY;
    vec high[8];
    for (vec& h : high) h = splat(-__builtin_inff());
    ivec odd = {};
    for (int64_t i = 0; i < whole; i += MANY)
        for (int v = 0; v < 8; v++) {
            const vec y = load(x + i + v * LANES);
            high[v] = y > high[v] ? y : high[v];
            odd |= y != y;
        }
    float top = -__builtin_inff();
    for (const vec& h : high) top = std::max(top, maximum(h));
    bool nan = any(odd);
    for (int64_t i = whole; i < n; i++) {
        top = std::max(top, widen(x[i]));
        nan |= widen(x[i]) != widen(x[i]);
    }
    int64_t i = 0;
    for (; i < whole; i += MANY) {
        ivec hit = {};
        for (int v = 0; v < 8; v++) {
            const vec y = load(x + i + v * LANES);
            hit |= nan ? y != y : y == splat(top);
        }
        if (any(hit)) break;
    }
    for (; i < n - 1; i++) {
        const float y = widen(x[i]);
        if (nan ? y != y : y == top) break;
    }
    return i;
}

}  // namespace

extern "C" {

int bm_argmax(int is_bf16, const void* x, int64_t stride, int64_t* out, int64_t rows, int64_t n, int32_t threads) {
    auto run = [&](auto type) {
        using T = decltype(type);
        for_rows(rows, n, threads, [=](int64_t i) { out[i] = argmax_row(static_cast<const T*>(x) + i * stride, n); });
    };
    is_bf16 ? run(bf16{}) : run(float{});
    return 0;
}

// x is [rows, heads, n] with strides in elements, out likewise; residual (rows = its rows, heads = 1) may be null.
int bm_rms_norm(int is_bf16, const void* x, int64_t x_row, int64_t x_head, void* residual, int64_t residual_row,
                const void* weight, void* out, int64_t out_row, int64_t out_head, int64_t rows, int32_t heads,
                int32_t n, float eps, int32_t threads) {
    auto run = [&](auto type) {
        using T = decltype(type);
        for_rows(rows, int64_t(heads) * n, threads, [=](int64_t i) {
            for (int h = 0; h < heads; h++)
                norm_row(static_cast<const T*>(x) + i * x_row + h * x_head,
                         residual ? static_cast<T*>(residual) + i * residual_row : nullptr,
                         static_cast<const T*>(weight), static_cast<T*>(out) + i * out_row + h * out_head, n, eps);
        });
    };
    is_bf16 ? run(bf16{}) : run(float{});
    return 0;
}

// Returns 4 when a slot, 5 when a position lies outside its table; nothing is written then.
int bm_rope_write_kv(int is_bf16, void* q, int64_t q_stride, void* k, int64_t k_stride, const void* v,
                     int64_t v_stride, const float* cos, const float* sin, int64_t max_pos, const int64_t* positions,
                     void* k_cache, void* v_cache, const int64_t* slot, int64_t tokens, int32_t heads,
                     int32_t kv_heads, int32_t dim, int32_t block_size, int64_t num_blocks, int32_t paired,
                     int32_t threads) {
    for (int64_t t = 0; t < tokens; t++) {
        if (slot[t] >= num_blocks * block_size) return 4;
        if (positions[t] < 0 || positions[t] >= max_pos) return 5;
    }
    auto run = [&](auto type) {
        using T = decltype(type);
        rope_write(static_cast<T*>(q), q_stride, static_cast<T*>(k), k_stride, static_cast<const T*>(v), v_stride, cos,
                   sin, positions, static_cast<T*>(k_cache), static_cast<T*>(v_cache), slot, tokens, heads, kv_heads,
                   {dim, block_size, paired != 0}, threads);
    };
    is_bf16 ? run(bf16{}) : run(float{});
    return 0;
}

int bm_silu_mul(int is_bf16, const void* gate_up, int64_t stride, void* out, int64_t rows, int32_t n,
                int32_t threads) {
    auto run = [&](auto type) {
        using T = decltype(type);
        silu_mul(static_cast<const T*>(gate_up), stride, static_cast<T*>(out), rows, n, threads);
    };
    is_bf16 ? run(bf16{}) : run(float{});
    return 0;
}
}
