// A register of floats with the compiler's vector extensions: one source for AVX-512, AVX2, SSE and NEON.
//
// Nothing here reassociates: no -ffast-math, sums run over fixed lanes in a fixed order, so a result depends on the
// values alone (and on the width, that is on the machine).
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
// Wider vectors than the registers would go through memory, so each machine gets its own width.
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2)));

template <int N>
struct Floats;
template <>
struct Floats<16> {
    typedef float type __attribute__((vector_size(64)));
};
template <>
struct Floats<8> {
    typedef float type __attribute__((vector_size(32)));
};
template <>
struct Floats<4> {
    typedef float type __attribute__((vector_size(16)));
};

struct bf16 {
    uint16_t bits;
};

INLINE vec splat(float x) { return x - vec{}; }

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

// Compilers halve the vectors for these conversions when they tune for any processor.
INLINE uvec widened(hvec h) {
#if defined(__AVX512F__)
    return (uvec)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h);
#else
    return __builtin_convertvector(h, uvec);
#endif
}
INLINE hvec narrowed(uvec u) {
#if defined(__AVX512F__)
    return (hvec)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)u);
#else
    return __builtin_convertvector(u, hvec);
#endif
}

INLINE vec load(const float* p) {
    vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
INLINE vec load(const bf16* p) {
    hvec h;
    std::memcpy(&h, p, sizeof h);
    return (vec)(widened(h) << 16);
}

// LANES pairs of neighbours; the first or the second of each.
INLINE uvec load_pairs(const bf16* p) {
    uvec u;
    std::memcpy(&u, p, sizeof u);
    return u;
}
INLINE vec first_of(uvec pairs) { return (vec)(pairs << 16); }
INLINE vec second_of(uvec pairs) { return (vec)(pairs & 0xffff0000); }

INLINE void store(float* p, vec x) { std::memcpy(p, &x, sizeof x); }
// The bits of a bfloat16 in the upper half of each lane; the lower half is anything.
INLINE uvec rounded_bits(vec x) {
    uvec u = (uvec)x;
    uvec nearest = u + 0x7fff + ((u >> 16) & 1);     // ties to even
    return (uvec)(x == x ? nearest : u | 0x400000);  // a NaN must not round to infinity
}
INLINE void store(bf16* p, vec x) {
    hvec h = narrowed(rounded_bits(x) >> 16);
    std::memcpy(p, &h, sizeof h);
}
// What comes back after a store.
INLINE vec rounded(vec x, float) { return x; }
INLINE vec rounded(vec x, bf16) { return (vec)(rounded_bits(x) & 0xffff0000); }

// The last n < LANES elements of a row: padded with zeros, so that every row takes the same path.
template <class T>
INLINE vec load_part(const T* p, int n) {
    T buffer[LANES] = {};
    std::memcpy(buffer, p, n * sizeof(T));
    return load(buffer);
}
template <class T>
INLINE void store_part(T* p, vec x, int n) {
    T buffer[LANES];
    store(buffer, x);
    std::memcpy(p, buffer, n * sizeof(T));
}

// Lanes are combined in halves, always in the same order.
template <int N, class F>
INLINE float fold(typename Floats<N>::type x, F f) {
    if constexpr (N == 4) {
        return f(f(x[0], x[1]), f(x[2], x[3]));
    } else {
        typename Floats<N / 2>::type half[2];
        std::memcpy(half, &x, sizeof x);
        return fold<N / 2>(f(half[0], half[1]), f);
    }
}
INLINE float sum(vec x) {
    return fold<LANES>(x, [](auto a, auto b) { return a + b; });
}
INLINE float maximum(vec x) {
    return fold<LANES>(x, [](auto a, auto b) { return a > b ? a : b; });
}

// 0, 1, 2, ...
INLINE ivec lanes() {
    ivec i;
    for (int l = 0; l < LANES; l++) i[l] = l;
    return i;
}

// 2^x to about 1 ulp, exactly 1 at 0, exactly 0 below -126, infinity above 127; NaN stays NaN.
INLINE vec exp2_(vec x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    vec low = splat(-126.0f), high = splat(127.0f);
    vec y = x < low ? low : x;
    y = y > high ? high : y;
    vec shifted = y + magic;
    vec f = y - (shifted - magic);
    vec p = f * 1.5353360e-4f + 1.3398876e-3f;
    p = p * f + 9.6184369e-3f;
    p = p * f + 5.5503324e-2f;
    p = p * f + 2.4022648e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    vec power = (vec)(((ivec)shifted - (ivec)splat(magic) + 127) << 23);
    p = x > high ? splat(__builtin_inff()) : p * power;
    return x < low ? vec{} : p;
}
