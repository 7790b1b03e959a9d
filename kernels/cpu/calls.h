// The functions of this library that others of it call. Their shapes: kernels.fused, kernels.interface, kernels.cpu.linear.
#pragma once

#include <cstdint>

extern "C" {

// Status of the calls that check: 0, or one of kernels.cpu.backend.ERRORS.
int bm_paged_attention(int is_bf16, const void* q, int64_t q_stride, const void* k_cache, const void* v_cache,
                       const int32_t* cu_q, const int32_t* kv_len, const int32_t* table, int32_t table_width,
                       void* out, int64_t out_stride, int32_t tokens, int32_t sequences,
                       int32_t heads, int32_t kv_heads, int32_t dim, int32_t block_size, int32_t num_blocks,
                       float scale, int32_t window, int32_t paired, int32_t threads);

int bm_rms_norm(int is_bf16, const void* x, int64_t x_row, int64_t x_head, void* residual, int64_t residual_row,
                const void* weight, void* out, int64_t out_row, int64_t out_head, int64_t rows, int32_t heads,
                int32_t n, float eps, int32_t threads);

int bm_rope_write_kv(int is_bf16, void* q, int64_t q_stride, void* k, int64_t k_stride, const void* v,
                     int64_t v_stride, const float* cos, const float* sin, int64_t max_pos, const int64_t* positions,
                     void* k_cache, void* v_cache, const int64_t* slot, int64_t tokens, int32_t heads,
                     int32_t kv_heads, int32_t dim, int32_t block_size, int64_t num_blocks, int32_t paired,
                     int32_t threads);

int bm_linear(int way, const void* x, int64_t x_stride, const void* packed, const void* bias, void* out,
              int64_t out_stride, int64_t rows, int64_t outputs, int64_t inputs, int32_t gated, int32_t threads);
}
