// Where a token's key and value lie in a block of the cache, for one key/value head (kernels/interface.py).
//
// Plain: keys [D, bs], values [bs, D]. Paired, for bfloat16 alone: keys [D/2, bs, 2], values [bs/2, D, 2]. What the
// matrix unit sums over lies side by side, so that it reads the cache as it is, and a lane of 32 bits holds two
// neighbours, of which either becomes a float with one instruction.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

struct Layout {
    int dim, block_size;
    bool paired;

    int64_t key(int d, int offset) const {
        return paired ? (int64_t(d / 2) * block_size + offset) * 2 + d % 2 : int64_t(d) * block_size + offset;
    }
    int64_t value(int offset, int d) const {
        return paired ? (int64_t(offset / 2) * dim + d) * 2 + offset % 2 : int64_t(offset) * dim + d;
    }
    // Of all tokens of a head's block: as many elements of keys as of values.
    int64_t size() const { return int64_t(dim) * block_size; }

    template <class T>
    void put(const T* k, const T* v, int offset, T* key_block, T* value_block) const {
        for (int d = 0; d < dim; d++) key_block[key(d, offset)] = k[d];
        if (paired)
            for (int d = 0; d < dim; d++) value_block[value(offset, d)] = v[d];
        else std::memcpy(value_block + value(offset, 0), v, dim * sizeof(T));
    }
};

}  // namespace
