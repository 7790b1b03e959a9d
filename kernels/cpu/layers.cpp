// The layers of a decoder in one call: what engines/model/lean.py does one operation at a time, with the same functions
// in the same order, so with the same bits. Between two operations nothing runs that would push a layer's code and data
// out of the near caches, as an interpreter does, and no other thread can hold the next one up.

#include "calls.h"

// The structures of kernels/cpu/layers.py.
struct Product {
    const void *packed, *bias;
    int64_t outputs, inputs;
};
struct Layer {
    const void *input_norm, *q_norm, *k_norm, *mlp_norm;  // q_norm and k_norm may be null
    Product qkv, o, gate_up, down;                        // gate_up is gated
    void *k_cache, *v_cache;
    int64_t window;
};
struct Model {
    const float *cos, *sin;
    int64_t max_pos, num_blocks;
    int32_t is_bf16, way, layers, hidden, heads, kv_heads, dim, block_size, paired;
    float eps, scale;
};
struct Batch {
    void *residual, *attended;   // [tokens, hidden], [tokens, heads * dim]
    void *x, *qkv, *activated;   // scratch: [tokens, hidden], [tokens, (heads + 2 kv_heads) dim], [tokens, ffn]
    const int64_t *positions, *slot;
    const int32_t *cu_q, *kv_len, *table;
    int32_t table_width, tokens, real_tokens, sequences, threads;
};

namespace {

void multiply(const Model& m, const Product& w, bool gated, const void* x, void* out, const Batch& b) {
    bm_linear(m.way, x, w.inputs, w.packed, w.bias, out, gated ? w.outputs / 2 : w.outputs, b.tokens, w.outputs,
              w.inputs, gated, b.threads);
}

void norm(const Model& m, const void* x, void* residual, const void* weight, const Batch& b) {
    bm_rms_norm(m.is_bf16, x, m.hidden, 0, residual, m.hidden, weight, b.x, m.hidden, 0, b.tokens, 1, m.hidden, m.eps,
                b.threads);
}

}  // namespace

extern "C" {

// Every layer but the second half of the last one: `attended` then waits for its projection, `residual` for what comes
// of it. Returns a status of calls.h.
int bm_layers(const Model* model, const Layer* layers, const Batch* batch) {
    const Model& m = *model;
    const Batch& b = *batch;
    const int64_t size = m.is_bf16 ? 2 : 4, width = int64_t(m.heads + 2 * m.kv_heads) * m.dim;
    char *q = static_cast<char*>(b.qkv), *k = q + size * m.heads * m.dim, *v = k + size * m.kv_heads * m.dim;
    norm(m, b.residual, nullptr, layers[0].input_norm, b);
    for (int i = 0; i < m.layers; i++) {
        const Layer& layer = layers[i];
        multiply(m, layer.qkv, false, b.x, b.qkv, b);
        if (layer.q_norm) {
            bm_rms_norm(m.is_bf16, q, width, m.dim, nullptr, 0, layer.q_norm, q, width, m.dim, b.tokens, m.heads, m.dim,
                        m.eps, b.threads);
            bm_rms_norm(m.is_bf16, k, width, m.dim, nullptr, 0, layer.k_norm, k, width, m.dim, b.tokens, m.kv_heads,
                        m.dim, m.eps, b.threads);
        }
        int status = bm_rope_write_kv(m.is_bf16, q, width, k, width, v, width, m.cos, m.sin, m.max_pos, b.positions,
                                      layer.k_cache, layer.v_cache, b.slot, b.tokens, m.heads, m.kv_heads, m.dim,
                                      m.block_size, m.num_blocks, m.paired, b.threads);
        if (!status)
            status = bm_paged_attention(m.is_bf16, q, width, layer.k_cache, layer.v_cache, b.cu_q, b.kv_len, b.table,
                                        b.table_width, b.attended, int64_t(m.heads) * m.dim, b.real_tokens,
                                        b.sequences, m.heads, m.kv_heads, m.dim, m.block_size, int32_t(m.num_blocks),
                                        m.scale, int32_t(layer.window), m.paired, b.threads);
        if (status) return status;
        if (i == m.layers - 1) break;
        multiply(m, layer.o, false, b.attended, b.x, b);
        norm(m, b.x, b.residual, layer.mlp_norm, b);
        multiply(m, layer.gate_up, true, b.x, b.activated, b);
        multiply(m, layer.down, false, b.activated, b.x, b);
        norm(m, b.x, b.residual, layers[i + 1].input_norm, b);
    }
    return 0;
}
}
