// Attention over a block-major pool of keys and values, by block table, on a CPU.
//
// A step comes as slices: a run of slots, and the tokens whose queries look at it. One slice serves all sequences that
// share its blocks. For each (token, head) a slice leaves a partial result: the weighted sum of values, not divided
// yet, the largest score and the sum of weights. When all slices are done, the partial results of each (token, head)
// are merged. Slots are copied out of the pool before any arithmetic, and only as many as were written: what an
// unwritten slot holds, NaN or not, is never read.
//
// Arithmetic is float32 throughout. Vectors are GCC's, as wide as the machine's; no intrinsics.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int TILE = 64;                                 // slots that are packed and scored at once
constexpr int MAX_COLUMNS = LANES == 16 ? 4 : 2;         // vectors of a register tile; with 4 rows they fit the registers
constexpr int MAX_ROWS = 4;
constexpr int FEW_ROWS = 8; // up to so many queries of a kv head are worked on where the pool lies

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint32_t UintVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2)));
// The same in memory, where nothing is aligned to more than its elements.
typedef Vec StoredVec __attribute__((aligned(4), may_alias));
typedef HalfVec StoredHalfVec __attribute__((aligned(2), may_alias));
struct Bfloat16 { uint16_t bits; };

// One slice, as the caller lays it out.
struct Slice {
    int32_t table;       // index of its first block in `blocks`
    int32_t position;    // of its first slot in the sequence; a multiple of the block size
    int32_t slots;
    int32_t first_token; // index in `tokens`
    int32_t num_tokens;
    int32_t first_head;  // kv heads to work on
    int32_t stop_head;
    int32_t record;      // where the partial results of its first token go
};

struct Call {
    const Slice* slices;
    const int32_t* blocks;
    const int32_t* tokens;        // per slice: indexes of the step's tokens
    const int32_t* positions;     // per token of the step
    const int32_t* record_starts; // per token of the step, and one more: its range in `records`
    const int32_t* records;
    float* partials;              // per record and head: head_dim, padded to LANES, then largest score, then sum
    const void* pool;             // the layer's keys of block 0
    const void* query;
    void* output;                 // [token, head, head_dim], contiguous
    float* lse;                   // [token, head], or null
    const float* sinks;           // per head, or null
    const void* key;              // the step's own keys and values, to be stored
    const void* value;
    const int64_t* slot_blocks;   // per token of the step: where they go
    const int64_t* slot_offsets;
    int64_t block_stride, part_stride, slot_stride, kv_head_stride; // of the pool, in elements
    int64_t query_token_stride, query_head_stride;
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    int32_t num_slices, num_tokens, heads, kv_heads, head_dim, block_size, threads;
    int32_t window;               // slots that a token sees, its own included
    float scale, softcap;         // softcap 0: none
};

INLINE Vec load(const float* from) { return *reinterpret_cast<const StoredVec*>(from); }
INLINE void store(float* to, Vec value) { *reinterpret_cast<StoredVec*>(to) = value; }
INLINE Vec load(const Bfloat16* from) {
    return (Vec)(__builtin_convertvector(*reinterpret_cast<const StoredHalfVec*>(from), UintVec) << 16);
}
INLINE float to_float(float x) { return x; }
INLINE float to_float(Bfloat16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}
INLINE void assign(float& to, float x) { to = x; }
INLINE void assign(Bfloat16& to, float x) { // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to.bits = std::isnan(x) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class Element> INLINE Vec load_first(const Element* from, int count) {
    if (count >= LANES) return load(from);
    float parts[LANES] = {};
    for (int i = 0; i < count; ++i) parts[i] = to_float(from[i]);
    return load(parts);
}

INLINE Vec splat(float x) { return Vec{} + x; }
INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }

template <class Combine> INLINE float reduce(Vec v, Combine combine) {
    float parts[LANES];
    store(parts, v);
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) parts[i] = combine(parts[i], parts[i + half]);
    return parts[0];
}
INLINE float sum_of(Vec v) {
    return reduce(v, [](float a, float b) { return a + b; });
}
INLINE float max_of(Vec v) {
    return reduce(v, [](float a, float b) { return a > b ? a : b; });
}

// exp to about one unit in the last place; 0 below the smallest normal number, NaN for NaN.
INLINE Vec exp_of(Vec x) {
    const Vec least = splat(-87.3365f), most = splat(88.7228f);
    Vec clamped = x < least ? least : x;
    clamped = clamped > most ? most : clamped;
    // Adding and taking away 1.5 * 2^23 rounds to an integer.
    const Vec magic = splat(12582912.0f);
    Vec power = clamped * 1.44269504f + magic;
    const UintVec exponent = (UintVec)power << 23;
    power = power - magic;
    Vec rest = clamped - power * 0.693359375f;
    rest = rest - power * -2.12194440e-4f;
    Vec result = splat(1.9875691500e-4f);
    result = result * rest + 1.3981999507e-3f;
    result = result * rest + 8.3334519073e-3f;
    result = result * rest + 4.1665795894e-2f;
    result = result * rest + 1.6666665459e-1f;
    result = result * rest + 5.0000001201e-1f;
    result = result * rest * rest + rest + 1.0f;
    result = result == result ? (Vec)((UintVec)result + exponent) : result;
    return x < least ? Vec{} : result;
}

INLINE Vec tanh_of(Vec x) {
    Vec twice = exp_of(x * 2.0f);
    return 1.0f - 2.0f / (twice + 1.0f);
}

// c[R rows][C vectors] (+)= a[R rows][inner] * b[inner][C vectors]
template <int R, int C>
static void multiply_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                          int inner, bool add) {
    Vec sums[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < C; ++j) sums[r][j] = add ? load(c + r * c_stride + j * LANES) : Vec{};
    for (int k = 0; k < inner; ++k) {
        Vec row[C];
#pragma GCC unroll 4
        for (int j = 0; j < C; ++j) row[j] = load(b + k * b_stride + j * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const float factor = a[r * a_stride + k];
#pragma GCC unroll 4
            for (int j = 0; j < C; ++j) sums[r][j] += factor * row[j];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < C; ++j) store(c + r * c_stride + j * LANES, sums[r][j]);
}

template <int C>
static void multiply_columns(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                             int64_t c_stride, int rows, int inner, bool add) {
    int r = 0;
    for (; r + MAX_ROWS <= rows; r += MAX_ROWS)
        multiply_tile<4, C>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride, c_stride, inner, add);
    a += r * a_stride;
    c += r * c_stride;
    switch (rows - r) {
    case 3: multiply_tile<3, C>(a, a_stride, b, b_stride, c, c_stride, inner, add); break;
    case 2: multiply_tile<2, C>(a, a_stride, b, b_stride, c, c_stride, inner, add); break;
    case 1: multiply_tile<1, C>(a, a_stride, b, b_stride, c, c_stride, inner, add); break;
    }
}

// `columns` is a multiple of LANES.
static void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                     int rows, int inner, int columns, bool add) {
    for (int done = 0; done < columns;) {
        const int left = (columns - done) / LANES;
        const float* part = b + done;
        float* out = c + done;
        if (MAX_COLUMNS == 4 && left >= 4) {
            multiply_columns<MAX_COLUMNS>(a, a_stride, part, b_stride, out, c_stride, rows, inner, add);
            done += 4 * LANES;
        } else if (left >= 2) {
            multiply_columns<2>(a, a_stride, part, b_stride, out, c_stride, rows, inner, add);
            done += 2 * LANES;
        } else {
            multiply_columns<1>(a, a_stride, part, b_stride, out, c_stride, rows, inner, add);
            done += LANES;
        }
    }
}

// Swap the off-diagonal halves of all square sub-blocks of this size; from LANES / 2 down to 1 it transposes.
template <int SIZE, int... LANE> INLINE void swap_halves(Vec* rows, std::integer_sequence<int, LANE...>) {
    constexpr IntVec upper = {(LANE & SIZE ? LANES + LANE - SIZE : LANE)...};
    constexpr IntVec lower = {(LANE & SIZE ? LANES + LANE : LANE + SIZE)...};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
        if (!(i & SIZE)) {
            const Vec a = rows[i], b = rows[i + SIZE];
            rows[i] = __builtin_shuffle(a, b, upper);
            rows[i + SIZE] = __builtin_shuffle(a, b, lower);
        }
}

INLINE void transpose(Vec* rows) {
    constexpr std::make_integer_sequence<int, LANES> lanes;
    if (LANES == 16) swap_halves<LANES / 2>(rows, lanes);
    swap_halves<4>(rows, lanes);
    swap_halves<2>(rows, lanes);
    swap_halves<1>(rows, lanes);
}

struct Scratch {
    std::vector<float> keys, values, queries, scores;
    std::vector<float> sums; // per kv head and row: weighted values; then largest score and sum of weights
};

static inline int padded(int head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

template <class Element>
static void find_slots(const Call& call, const Slice& slice, int first, int count, const Element** slots) {
    const Element* pool = static_cast<const Element*>(call.pool) + slice.first_head * call.kv_head_stride;
    for (int i = 0; i < count; ++i) {
        const int slot = first + i;
        slots[i] = pool + call.blocks[slice.table + slot / call.block_size] * call.block_stride +
                   slot % call.block_size * call.slot_stride;
    }
}

// Copy one kv head's slots out of the pool: keys as [head_dim][TILE], where zeros stand for slots that are not there,
// and values as [TILE][head_dim].
template <class Element>
static void pack(const Call& call, const Element* const* slots, int count, float* keys, float* values) {
    const int size = call.head_dim, width = padded(size);
    for (int group = 0; group < TILE; group += LANES)
        for (int column = 0; column < width; column += LANES) {
            Vec rows[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i)
                rows[i] = group + i < count ? load_first(slots[group + i] + column, size - column) : Vec{};
            transpose(rows);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) store(keys + (column + i) * TILE + group, rows[i]);
        }
    for (int i = 0; i < count; ++i)
        for (int column = 0; column < width; column += LANES)
            store(values + i * width + column, load_first(slots[i] + call.part_stride + column, size - column));
}

// Sum each of LANES vectors: lane i of the result is the sum of the lanes of rows[i].
template <int SIZE, int... LANE> INLINE void add_halves(Vec* rows, std::integer_sequence<int, LANE...>) {
    constexpr IntVec upper = {(LANE & SIZE ? LANES + LANE - SIZE : LANE)...};
    constexpr IntVec lower = {(LANE & SIZE ? LANES + LANE : LANE + SIZE)...};
#pragma GCC unroll 8
    for (int i = 0; i < SIZE; ++i)
        rows[i] = __builtin_shuffle(rows[i], rows[i + SIZE], upper) + __builtin_shuffle(rows[i], rows[i + SIZE], lower);
}
INLINE Vec sums_of(Vec* rows) {
    constexpr std::make_integer_sequence<int, LANES> lanes;
    if (LANES == 16) add_halves<LANES / 2>(rows, lanes);
    add_halves<4>(rows, lanes);
    add_halves<2>(rows, lanes);
    add_halves<1>(rows, lanes);
    return rows[0];
}

// The few queries of a decode step are scored against the pool where it lies: copying keys in another order would
// cost more than it saves.
template <class Element, int R>
static void score_in_place(const Element* const* slots, int count, int64_t part_stride, const float* queries, int width,
                           float* scores) {
    for (int group = 0; group < TILE; group += LANES) {
        Vec products[R][LANES];
        for (int i = 0; i < LANES; ++i) {
            Vec sums[R] = {};
            if (group + i < count)
                for (int column = 0; column < width; column += LANES) {
                    __builtin_prefetch(slots[group + i] + part_stride + column); // the values are next
                    __builtin_prefetch(slots[std::min(group + i + LANES, count - 1)] + column);
                    const Vec key = load(slots[group + i] + column);
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) sums[r] += key * load(queries + r * width + column);
                }
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) products[r][i] = sums[r];
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) store(scores + r * TILE + group, sums_of(products[r]));
    }
}

template <class Element, int R, int C>
static void add_values_in_place(const Element* const* slots, int count, const float* weights, float* sums, int stride) {
    Vec totals[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < C; ++j) totals[r][j] = load(sums + r * stride + j * LANES);
    for (int i = 0; i < count; ++i) {
        Vec value[C];
#pragma GCC unroll 4
        for (int j = 0; j < C; ++j) value[j] = load(slots[i] + j * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int j = 0; j < C; ++j) totals[r][j] += weights[r * TILE + i] * value[j];
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < C; ++j) store(sums + r * stride + j * LANES, totals[r][j]);
}

INLINE float base_of(float most) { return most == -INFINITY ? 0.0f : most; }

// Turn one row of scores into weights, and its sums so far into what they are under the new largest score. Slots
// outside [first, stop) of the tile are not seen.
static void weigh(float* scores, int first, int stop, float softcap, float* sums, int width) {
    IntVec lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    Vec most = splat(-INFINITY);
    const bool cut = first > 0 || stop < TILE;
    for (int i = 0; i < TILE; i += LANES) {
        Vec score = load(scores + i);
        if (softcap != 0) score = tanh_of(score / softcap) * softcap;
        if (cut) score = (lane + i >= first) & (lane + i < stop) ? score : splat(-INFINITY);
        if (cut || softcap != 0) store(scores + i, score);
        most = larger(score, most);
    }
    float& largest = sums[width];
    float& total = sums[width + 1];
    const float before = largest, now = std::fmax(before, max_of(most));
    const float base = base_of(now);
    Vec weights = {};
    for (int i = 0; i < TILE; i += LANES) {
        Vec weight = exp_of(load(scores + i) - base);
        store(scores + i, weight);
        weights += weight;
    }
    if (now != before) {
        const float shrink = std::exp(before - base);
        for (int i = 0; i < width; i += LANES) store(sums + i, load(sums + i) * shrink);
        total *= shrink;
        largest = now;
    }
    total += sum_of(weights);
}

template <class Element> static void gather_queries(const Call& call, const Slice& slice, int head, float* queries) {
    const int group = call.heads / call.kv_heads, width = padded(call.head_dim);
    const int32_t* tokens = call.tokens + slice.first_token;
    for (int t = 0; t < slice.num_tokens; ++t)
        for (int g = 0; g < group; ++g, queries += width) {
            const Element* from = static_cast<const Element*>(call.query) + tokens[t] * call.query_token_stride +
                                  (head * group + g) * call.query_head_stride;
            for (int i = 0; i < width; i += LANES) store(queries + i, load_first(from + i, call.head_dim - i) * call.scale);
        }
}

static void weigh_rows(const Call& call, const Slice& slice, int position, int count, int first, int rows, float* scores,
                       float* sums) {
    const int group = call.heads / call.kv_heads, width = padded(call.head_dim);
    for (int row = 0; row < rows; ++row) {
        const int64_t sees = call.positions[call.tokens[slice.first_token + (first + row) / group]] + 1 - position;
        weigh(scores + row * TILE, std::clamp<int64_t>(sees - call.window, 0, TILE), std::clamp<int64_t>(sees, 0, count),
              call.softcap, sums + row * (width + 2), width);
    }
}

// Score one tile against `R` of one kv head's queries, and add its values to their sums.
template <class Element, int R>
static void attend_in_place(const Call& call, const Slice& slice, int position, const Element* const* slots, int count,
                            int first, const float* queries, float* sums) {
    const int width = call.head_dim;
    float scores[R * TILE];
    queries += first * width;
    sums += first * (width + 2);
    score_in_place<Element, R>(slots, count, call.part_stride, queries, width, scores);
    weigh_rows(call, slice, position, count, first, R, scores, sums);
    const Element* values[TILE];
    for (int i = 0; i < count; ++i) values[i] = slots[i] + call.part_stride;
    int column = 0;
    const auto step_over = [&](int columns) {
        for (int i = 0; i < count; ++i) values[i] += columns;
        column += columns;
    };
    for (; column + MAX_COLUMNS * LANES <= width; step_over(MAX_COLUMNS * LANES))
        add_values_in_place<Element, R, MAX_COLUMNS>(values, count, scores, sums + column, width + 2);
    for (; column < width; step_over(LANES))
        add_values_in_place<Element, R, 1>(values, count, scores, sums + column, width + 2);
}

template <class Element>
static void attend_few(const Call& call, const Slice& slice, int position, const Element* const* slots, int count,
                       int rows, const float* queries, float* sums) {
    int row = 0;
    for (; row + 4 <= rows; row += 4)
        attend_in_place<Element, 4>(call, slice, position, slots, count, row, queries, sums);
    switch (rows - row) {
    case 3: attend_in_place<Element, 3>(call, slice, position, slots, count, row, queries, sums); break;
    case 2: attend_in_place<Element, 2>(call, slice, position, slots, count, row, queries, sums); break;
    case 1: attend_in_place<Element, 1>(call, slice, position, slots, count, row, queries, sums); break;
    }
}

template <class Element>
static void attend_many(const Call& call, const Slice& slice, int position, const Element* const* slots, int count,
                        int rows, const float* queries, float* sums, Scratch& scratch) {
    const int width = padded(call.head_dim);
    float *keys = scratch.keys.data(), *values = scratch.values.data(), *scores = scratch.scores.data();
    pack(call, slots, count, keys, values);
    multiply(queries, width, keys, TILE, scores, TILE, rows, call.head_dim, TILE, false);
    weigh_rows(call, slice, position, count, 0, rows, scores, sums);
    multiply(scores, TILE, values, width, sums, width + 2, rows, count, width, true);
}

template <class Element> static void attend_slice(const Call& call, const Slice& slice, Scratch& scratch) {
    const int group = call.heads / call.kv_heads, width = padded(call.head_dim), rows = slice.num_tokens * group;
    const int heads = slice.stop_head - slice.first_head;
    scratch.keys.resize(width * TILE);
    scratch.values.resize(width * TILE);
    scratch.scores.resize(rows * TILE);
    scratch.queries.resize(heads * rows * width);
    scratch.sums.assign(static_cast<size_t>(heads) * rows * (width + 2), 0.0f);
    for (int h = 0; h < heads; ++h) {
        gather_queries<Element>(call, slice, slice.first_head + h, scratch.queries.data() + h * rows * width);
        for (int row = 0; row < rows; ++row) scratch.sums[(h * rows + row) * (width + 2) + width] = -INFINITY;
    }
    int64_t earliest = INT32_MAX;
    for (int t = 0; t < slice.num_tokens; ++t)
        earliest = std::min<int64_t>(earliest, call.positions[call.tokens[slice.first_token + t]]);
    // Tiles that no token's window reaches are not read.
    const int64_t hidden = earliest + 1 - call.window - slice.position;
    const bool in_place = rows <= FEW_ROWS && width == call.head_dim;
    for (int first = hidden > 0 ? hidden / TILE * TILE : 0; first < slice.slots; first += TILE) {
        const int count = std::min(slice.slots - first, TILE), position = slice.position + first;
        const Element* slots[TILE];
        find_slots(call, slice, first, count, slots);
        for (int h = 0; h < heads; ++h) {
            const float* queries = scratch.queries.data() + h * rows * width;
            float* sums = scratch.sums.data() + static_cast<size_t>(h) * rows * (width + 2);
            if (in_place)
                attend_few(call, slice, position, slots, count, rows, queries, sums);
            else
                attend_many(call, slice, position, slots, count, rows, queries, sums, scratch);
            for (int i = 0; i < count; ++i) slots[i] += call.kv_head_stride;
        }
    }
    for (int h = 0; h < heads; ++h)
        for (int t = 0; t < slice.num_tokens; ++t) {
            const int64_t to = static_cast<int64_t>(slice.record + t) * call.heads + (slice.first_head + h) * group;
            std::memcpy(call.partials + to * (width + 2), scratch.sums.data() + (h * rows + t * group) * (width + 2),
                        sizeof(float) * group * (width + 2));
        }
}

template <class Element> static void merge(const Call& call, int token) {
    const int width = padded(call.head_dim);
    std::vector<float> result(width);
    for (int head = 0; head < call.heads; ++head) {
        const int begin = call.record_starts[token], end = call.record_starts[token + 1];
        float most = call.sinks ? call.sinks[head] : -INFINITY;
        auto partial = [&](int i) {
            return call.partials + (static_cast<int64_t>(call.records[i]) * call.heads + head) * (width + 2);
        };
        for (int i = begin; i < end; ++i) most = std::fmax(most, partial(i)[width]);
        const float base = base_of(most);
        float total = call.sinks ? std::exp(call.sinks[head] - base) : 0.0f;
        std::fill(result.begin(), result.end(), 0.0f);
        for (int i = begin; i < end; ++i) {
            const float* from = partial(i);
            const float weight = std::exp(from[width] - base);
            total += weight * from[width + 1];
            for (int j = 0; j < width; j += LANES) store(&result[j], load(&result[j]) + load(from + j) * weight);
        }
        Element* output = static_cast<Element*>(call.output) + (static_cast<int64_t>(token) * call.heads + head) * call.head_dim;
        for (int j = 0; j < call.head_dim; ++j) assign(output[j], result[j] / total);
        if (call.lse) call.lse[static_cast<int64_t>(token) * call.heads + head] = base + std::log(total);
    }
}

template <class Element> static void attend(const Call& call) {
#pragma omp parallel num_threads(call.threads)
    {
        Scratch scratch;
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < call.num_slices; ++i) attend_slice<Element>(call, call.slices[i], scratch);
#pragma omp for schedule(static)
        for (int token = 0; token < call.num_tokens; ++token) merge<Element>(call, token);
    }
}

template <class Element> static void write(const Call& call) {
    const size_t bytes = sizeof(Element) * call.head_dim;
#pragma omp parallel for num_threads(call.threads) schedule(static) if (call.num_tokens > 32)
    for (int token = 0; token < call.num_tokens; ++token) {
        Element* slot = static_cast<Element*>(const_cast<void*>(call.pool)) +
                        call.slot_blocks[token] * call.block_stride + call.slot_offsets[token] * call.slot_stride;
        const Element* key = static_cast<const Element*>(call.key) + token * call.key_token_stride;
        const Element* value = static_cast<const Element*>(call.value) + token * call.value_token_stride;
        for (int head = 0; head < call.kv_heads; ++head) {
            std::memcpy(slot + head * call.kv_head_stride, key + head * call.key_head_stride, bytes);
            std::memcpy(slot + call.part_stride + head * call.kv_head_stride, value + head * call.value_head_stride, bytes);
        }
    }
}

extern "C" {
int call_bytes() { return sizeof(Call); }
int lanes() { return LANES; }
void attend_float32(const Call* call) { attend<float>(*call); }
void attend_bfloat16(const Call* call) { attend<Bfloat16>(*call); }
void write_float32(const Call* call) { write<float>(*call); }
void write_bfloat16(const Call* call) { write<Bfloat16>(*call); }
}
