// Causal paged attention over a ragged batch, and the write of new keys and values into the cache.
//
// Layout of the caches: layout.h. A row of work is one (query, head);
// the heads that share a key/value head are packed as neighbouring rows. Work items are (sequence, key/value head,
// block of queries), taken largest first from an atomic counter.
//
// Bits: each row meets the keys in tiles of TILE that start at position 0, with an online softmax in float32 (Milakov
// and Gimelshein 2018; FlashAttention, Dao et al. 2022). Every SEGMENT keys the sums are closed and merged with those
// before, in order, so that long sequences can be split over threads (Flash-Decoding, Dao et al. 2023) at places that
// depend on the position alone. A row's result depends neither on its neighbours, nor on how its prompt was cut, nor
// on the number of threads. A masked key has weight exactly 0, and its value is only multiplied where another row of
// the item sees it. Slots that nobody wrote and blocks below every row's window are never used.

#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <type_traits>

#include "calls.h"
#include "rows_few.h"
#include "rows_matrix.h"
#include "rows_vector.h"

namespace {

constexpr int ROWS = 96;      // rows of a work item: its keys stay in the near caches meanwhile
constexpr int SEGMENT = 512;  // keys, a multiple of TILE
constexpr int64_t WORTH_THREADS = 1 << 16;  // keys * components: waking a thread costs about as long
static_assert(SEGMENT % TILE == 0);

enum Status { OK = 0, BAD_CU_Q = 1, BAD_BLOCK = 2, NO_MEMORY = 3, BAD_SLOT = 4, BAD_LENGTH = 6 };

#ifdef __AMX_BF16__
template <class T>
using Form = std::conditional_t<std::is_same_v<T, bf16>, MatrixRows, VectorRows<T>>;
#else
template <class T>
using Form = VectorRows<T>;
#endif

// A sequence and key/value head whose segments are items of their own. The one that ends last merges them all.
struct Split {
    std::atomic<int> open;
    int first, segments;  // the first segment's number
    std::vector<float> states;
    Split(int first, int segments, size_t size)
        : open(segments), first(first), segments(segments), states(segments * size) {}
};

struct Plan {
    std::vector<Item> items;
    std::vector<std::unique_ptr<Split>> splits;
    int threads;
    size_t run = 1;  // items that a thread takes at once
};

// Cuts the batch into items. Where they are too few for the threads, long ones are split by segments; what is not worth
// waking anybody stays with the caller.
template <class T>
Plan cut(const Problem& p, int sequences, int threads) {
    Plan plan{{}, {}, threads};
    const int group = p.group(), step = std::max(1, ROWS / group);
    int64_t cost = 0;
    for (int s = 0; s < sequences; s++) {
        const int queries = p.cu_q[s + 1] - p.cu_q[s];
        for (int first = 0; first < queries; first += step) {
            const int count = std::min(step, queries - first), position = p.kv_len[s] - queries + first;
            const int64_t keys = std::max(1, position + count - p.lowest(position));
            for (int h = 0; h < p.kv_heads; h++) {
                plan.items.push_back({keys * ((count * group + MR - 1) / MR), s, h, first, count, -1, 0});
                cost += plan.items.back().cost;
            }
        }
    }
    if (cost * p.dim < WORTH_THREADS) plan.threads = 1;
    if (plan.threads <= 1) return plan;
    if (plan.items.size() < size_t(4 * threads)) {
        std::vector<Item> whole;
        whole.swap(plan.items);
        for (const Item& item : whole) {
            const int32_t* bounds = p.cu_q + item.sequence;
            const int position = p.kv_len[item.sequence] - (bounds[1] - bounds[0]) + item.first;
            const int first = p.lowest(position) / SEGMENT;
            const int segments = (std::max(1, position + item.count) + SEGMENT - 1) / SEGMENT - first;
            if (segments < 2) {
                plan.items.push_back(item);
                continue;
            }
            const size_t size = State::size(Form<T>::state_rows(item.count * group), p.padded_dim());
            for (int s = 0; s < segments; s++) {
                plan.items.push_back(item);
                plan.items.back().cost = std::max<int64_t>(1, item.cost / segments);
                plan.items.back().split = plan.splits.size();
                plan.items.back().segment = first + s;
            }
            plan.splits.push_back(std::make_unique<Split>(first, segments, size));
        }
    }
    const auto larger = [](const Item& a, const Item& b) { return a.cost > b.cost; };
    std::stable_sort(plan.items.begin(), plan.items.end(), larger);
    if (plan.items.size() >= size_t(8 * threads * p.kv_heads)) plan.run = p.kv_heads;
    return plan;
}

template <class T>
void finish(const Problem& p, const Item& item, const Rows& rows, const State& state) {
    const int padded = p.padded_dim();
    T* out = static_cast<T*>(p.out) + (p.cu_q[item.sequence] + item.first) * p.out_stride +
             int64_t(item.kv_head) * rows.group * p.dim;
    for (int row = 0; row < rows.count; row++) {
        const float total = sum(load(state.total + row * LANES));
        const float inverse = total == 0 ? 0.0f : 1.0f / total;
        T* to = out + row / rows.group * p.out_stride + int64_t(row % rows.group) * p.dim;
        const float* from = state.acc + int64_t(row) * padded;
        for (int c = 0; c < p.dim; c += LANES) store_part(to + c, load(from + c) * inverse, std::min(LANES, p.dim - c));
    }
}

// A thread's share of a plan: runs of items, as the threads come for them. The key/value heads of a sequence are one run
// where that leaves enough of them: a block holds its heads side by side, so what the processor fetches past the end of
// one is the beginning of what the same thread reads next.
class Share {
    const Plan& plan;
    std::atomic<size_t>& taken;  // items, by all threads
    size_t next = 0, end = 0;

   public:
    Share(const Plan& plan, std::atomic<size_t>& taken) : plan(plan), taken(taken) {}
    // Null when there are no more.
    const Item* take() {
        if (next == end) {
            next = taken.fetch_add(plan.run, std::memory_order_relaxed);
            end = next + plan.run;
        }
        const size_t i = next++;
        return i < plan.items.size() ? &plan.items[i] : nullptr;
    }
};

// The keys lowest .. end - 1 are those that some row of an item sees.
struct Range {
    int position, lowest, end;
    Range(const Problem& p, const Item& item) {
        const int32_t* bounds = p.cu_q + item.sequence;
        position = p.kv_len[item.sequence] - (bounds[1] - bounds[0]) + item.first;
        lowest = p.lowest(position), end = position + item.count;
        if (item.split < 0) return;
        lowest = std::max(lowest, item.segment * SEGMENT);
        end = std::min(end, (item.segment + 1) * SEGMENT);
    }
    int start() const { return lowest / TILE * TILE; }
    Part part(const Item& item, int start) const {
        return {&item, start, std::max(0, lowest - start), std::min(TILE, end - start)};
    }
};

// Returns the item that comes after this one: it is taken when the last tile is begun, so that its first tile can be
// fetched meanwhile, and not before, so that no thread keeps it from another.
template <class T, class F>
const Item* run_item(const Problem& p, const Item& item, const Plan& plan, Share& share, Arena& arena) {
    const Range range(p, item);
    const Rows rows{item.count * p.group(), p.group(), range.position};
    const int padded = p.padded_dim();
    const int count = F::state_rows(rows.count);
    const size_t size = State::size(count, padded);
    arena.reserve(F::bytes(p, rows) + Arena::rounded(4 * size) * 2);
    State sums(arena.take<float>(size), count, padded), state(arena.take<float>(size), count, padded);
    Split* split = item.split < 0 ? nullptr : plan.splits[item.split].get();
    if (split) state = State(split->states.data() + (item.segment - split->first) * size, count, padded);
    const T* queries = static_cast<const T*>(p.q) + (p.cu_q[item.sequence] + item.first) * p.q_stride +
                       int64_t(item.kv_head) * rows.group * p.dim;
    F form(p, rows, queries, arena);
    state.clear(count, padded);
    bool merged = false;
    const Item* after = nullptr;
    int start = range.start();
    for (; start + TILE < range.end; start += TILE) {
        const Part next = range.part(item, start + TILE);
        form.meet(state, range.part(item, start), &next);
        if ((start + TILE) % SEGMENT == 0) {
            if (merged) merge(sums, state, rows.count, padded);
            else std::swap(sums, state);
            state.clear(count, padded);
            merged = true;
        }
    }
    after = share.take();
    if (start < range.end) {
        std::optional<Part> next;
        if (after) {
            const Range its(p, *after);
            if (its.start() < its.end) next = its.part(*after, its.start());
        }
        form.meet(state, range.part(item, start), next ? &*next : nullptr);
    }
    if (!split) {
        if (merged) merge(sums, state, rows.count, padded);
        finish<T>(p, item, rows, merged ? sums : state);
    } else if (split->open.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        State all(split->states.data(), count, padded);
        for (int s = 1; s < split->segments; s++)
            merge(all, State(split->states.data() + s * size, count, padded), rows.count, padded);
        finish<T>(p, item, rows, all);
    }
    return after;
}

#ifdef __AMX_BF16__
// Whether a row has the same bits in tiles as in vectors on this processor.
bool forms_agree() {
    constexpr int HEADS = 4, KEYS = 150, DIM = 96;
    constexpr int32_t cu_q[] = {0, 1}, kv_len[] = {KEYS}, table[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    std::vector<bf16> q(HEADS * DIM), k(160 * DIM), v(160 * DIM), out[2] = {q, q};
    uint32_t random = 1;
    for (std::vector<bf16>* x : {&q, &k, &v})
        for (bf16& value : *x) {
            random = random * 1664525 + 1013904223;
            value.bits = random >> 16 & 0x81ff;            // a sign, and a number below 2^-123, or
            if (random >> 8 & 63) value.bits |= 0x3e00;    // mostly, one between 1/8 and 2
        }
    Arena arena;
    const Plan plan{{}, {}, 1};
    MatrixRows::Mode mode;
    for (int form = 0; form < 2; form++) {
        const Problem p{q.data(), k.data(), v.data(), out[form].data(), 0, 0, 10, cu_q, kv_len, table,
                        HEADS, 1, DIM, 16, 0.1f, 0, {DIM, 16, true}};
        std::atomic<size_t> taken{0};
        Share share(plan, taken);
        const Item item{1, 0, 0, 0, 1, -1, 0};
        form ? run_item<bf16, FewRows>(p, item, plan, share, arena)
             : run_item<bf16, MatrixRows>(p, item, plan, share, arena);
    }
    return std::memcmp(out[0].data(), out[1].data(), HEADS * DIM * 2) == 0;
}
#endif

template <class T>
void work(const Problem& p, const Plan& plan, std::atomic<size_t>& taken) {
    thread_local Arena arena;
    typename Form<T>::Mode mode;
    Share share(plan, taken);
#ifdef __AMX_BF16__
    static const bool agree = forms_agree();
#endif
    for (const Item* item = share.take(); item;) {
#ifdef __AMX_BF16__
        if constexpr (std::is_same_v<T, bf16>)
            if (agree && FewRows::suits(p, item->count * p.group())) {
                item = run_item<T, FewRows>(p, *item, plan, share, arena);
                continue;
            }
#endif
        item = run_item<T, Form<T>>(p, *item, plan, share, arena);
    }
}

template <class T>
void run(const Problem& p, int sequences, int threads) {
    const Plan plan = cut<T>(p, sequences, threads);
    std::atomic<size_t> taken{0};
    if (plan.threads <= 1) return work<T>(p, plan, taken);
#pragma omp parallel num_threads(plan.threads)
    work<T>(p, plan, taken);
}

template <class T>
int write(const T* k, int64_t k_stride, const T* v, int64_t v_stride, T* k_cache, T* v_cache, const int64_t* slot,
          int64_t tokens, int heads, const Layout& layout) {
    for (int64_t t = 0; t < tokens; t++) {
        if (slot[t] < 0) continue;
        const int64_t block = slot[t] / layout.block_size, offset = slot[t] % layout.block_size;
        for (int h = 0; h < heads; h++) {
            const int64_t base = (block * heads + h) * layout.size();
            layout.put(k + t * k_stride + h * layout.dim, v + t * v_stride + h * layout.dim, int(offset),
                       k_cache + base, v_cache + base);
        }
    }
    return OK;
}

}  // namespace

extern "C" {

// Whether this process may use the instructions that the library was compiled for, beyond what the CPU's flags say.
int bm_supported() { return may_use_tiles() ? 0 : 1; }

// Strides in elements. is_bf16: q, caches and out are bfloat16, else float32. paired: layout.h. window 0: none. Returns
// a Status.
int bm_paged_attention(int is_bf16, const void* q, int64_t q_stride, const void* k_cache, const void* v_cache,
                       const int32_t* cu_q, const int32_t* kv_len, const int32_t* table, int32_t table_width,
                       void* out, int64_t out_stride, int32_t tokens, int32_t sequences,
                       int32_t heads, int32_t kv_heads, int32_t dim, int32_t block_size, int32_t num_blocks,
                       float scale, int32_t window, int32_t paired, int32_t threads) {
    Problem p{q,   k_cache, v_cache, out,   q_stride, out_stride, table_width, cu_q,
              kv_len, table, heads,   kv_heads, dim,  block_size, scale, window, {dim, block_size, paired != 0}};
    if (cu_q[0] != 0 || cu_q[sequences] != tokens) return BAD_CU_Q;
    try {
        for (int s = 0; s < sequences; s++) {
            const int queries = cu_q[s + 1] - cu_q[s];
            if (queries < 0 || queries > tokens) return BAD_CU_Q;
            if (kv_len[s] < 0) return BAD_LENGTH;
            if (queries == 0) continue;
            const int64_t blocks = (int64_t(kv_len[s]) + block_size - 1) / block_size;
            if (blocks > table_width) return BAD_BLOCK;
            for (int64_t b = p.lowest(kv_len[s] - queries) / block_size; b < blocks; b++)
                if (uint32_t(table[int64_t(s) * table_width + b]) >= uint32_t(num_blocks)) return BAD_BLOCK;
        }
        is_bf16 ? run<bf16>(p, sequences, threads) : run<float>(p, sequences, threads);
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
    return OK;
}

int bm_write_kv(int is_bf16, const void* k, int64_t k_stride, const void* v, int64_t v_stride, void* k_cache,
                void* v_cache, const int64_t* slot, int64_t tokens, int32_t kv_heads, int32_t dim, int32_t block_size,
                int64_t num_blocks, int32_t paired) {
    const Layout layout{dim, block_size, paired != 0};
    for (int64_t t = 0; t < tokens; t++)
        if (slot[t] >= num_blocks * block_size) return BAD_SLOT;
    if (is_bf16)
        return write(static_cast<const bf16*>(k), k_stride, static_cast<const bf16*>(v), v_stride,
                     static_cast<bf16*>(k_cache), static_cast<bf16*>(v_cache), slot, tokens, kv_heads, layout);
    return write(static_cast<const float*>(k), k_stride, static_cast<const float*>(v), v_stride,
                 static_cast<float*>(k_cache), static_cast<float*>(v_cache), slot, tokens, kv_heads, layout);
}
}
