// Weights in 16 bits, eight at a time. The same bits as the functions for one weight in narrow.hpp.

typedef uint32_t Bits8 __attribute__((vector_size(32)));
typedef uint16_t Short8 __attribute__((vector_size(16)));
typedef uint16_t Short8Unaligned __attribute__((vector_size(16), aligned(2), may_alias));

struct Half {
  uint16_t bits;
  operator float() const { return half_to_float(bits); }
};
struct Bf16 {
  uint16_t bits;
  operator float() const { return bf16_to_float(bits); }
};

static inline Short8 load_short8(const void* p) { return *static_cast<const Short8Unaligned*>(p); }
static inline void store_short8(void* p, Short8 v) { *static_cast<Short8Unaligned*>(p) = v; }

static inline Short8 lower_halves(Bits8 v) {
#if defined(__AVX2__)
  const __m256i x = reinterpret_cast<__m256i>(v);
  return reinterpret_cast<Short8>(_mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
#else
  return __builtin_convertvector(v, Short8);
#endif
}

static inline Vec8 clamp8(Vec8 x, float largest) {
  const Vec8 high = broadcast(largest, x);
  return choose(x > high, high, choose(x < -high, -high, x));
}

static inline Vec8 load8(const Bf16* p) {
  return reinterpret_cast<Vec8>(__builtin_convertvector(load_short8(p), Bits8) << 16);
}
static inline void store8(Bf16* p, Vec8 x) {
  const Bits8 bits = reinterpret_cast<Bits8>(clamp8(x, kLargestBf16));
  const Bits8 rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const Bits8 nan = Bits8{} + 0x7fc0u;
  store_short8(p, lower_halves(x == x ? rounded : nan));
}

static inline Vec8 load8(const Half* p) {
#if defined(__F16C__)
  return reinterpret_cast<Vec8>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(load_short8(p))));
#else
  const Bits8 half = __builtin_convertvector(load_short8(p), Bits8);
  const Bits8 sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  const Vec8 small = __builtin_convertvector(reinterpret_cast<Mask8>(rest), Vec8) * 5.9604645e-08f;
  const Bits8 special = 0x7f800000u | (rest & 0x3ffu) << 13;
  const Bits8 usual = (rest << 13) + (112u << 23);
  const Bits8 size = rest >= 0x7c00u ? special : rest >= 0x400u ? usual : reinterpret_cast<Bits8>(small);
  return reinterpret_cast<Vec8>(sign | size);
#endif
}
static inline void store8(Half* p, Vec8 x) {
  const Vec8 inside = clamp8(x, kLargestHalf);
#if defined(__F16C__)
  const Vec8 nan = reinterpret_cast<Vec8>(Bits8{} + 0x7fc00000u);
  const Vec8 clean = choose(x == x, inside, nan);
  store_short8(p, reinterpret_cast<Short8>(
                      _mm256_cvtps_ph(reinterpret_cast<__m256>(clean), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
#else
  const Bits8 bits = reinterpret_cast<Bits8>(inside), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  const Bits8 usual = (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13;
  const Bits8 small = reinterpret_cast<Bits8>(reinterpret_cast<Vec8>(rest) + 0.5f) - 0x3f000000u;
  const Bits8 rounded = sign | (rest >= 113u << 23 ? usual : small);
  const Bits8 nan = Bits8{} + 0x7e00u;
  store_short8(p, lower_halves(x == x ? rounded : nan));
#endif
}

static inline void round_one(Half* p, float x) { p->bits = float_to_half(x); }
static inline void round_one(Bf16* p, float x) { p->bits = float_to_bf16(x); }
static inline void round_one(Half* p, float x, uint32_t draw) { p->bits = float_to_half(x, draw); }
static inline void round_one(Bf16* p, float x, uint32_t draw) { p->bits = float_to_bf16(x, draw); }

template <class Stored>
static inline void widen_run(const Stored* from, int n, float* to) {
  int i = 0;
  for (; i + 8 <= n; i += 8) store8(to + i, load8(from + i));
  for (; i < n; ++i) to[i] = from[i];
}

template <class Stored>
static inline void narrow_run(const float* from, int n, Stored* to) {
  int i = 0;
  for (; i + 8 <= n; i += 8) store8(to + i, load8(from + i));
  for (; i < n; ++i) round_one(to + i, from[i]);
}

template <class Stored>
static void narrow_run(const float* from, const WeightRun& run, uint64_t key, Stored* to) {
  DrawPair pair{};
  for (int i = 0; i < run.count; ++i) {
    const uint32_t column = static_cast<uint32_t>(run.first + i);
    if (i == 0 || !(column & 1)) pair = draw_pair(key, column);
    round_one(to + i, from[i], column & 1 ? pair.odd : pair.even);
  }
}

static void widen(const WeightRun* runs, int32_t num_runs, const char* stored, float* weights) {
  for (int k = 0; k < num_runs; ++k) {
    const WeightRun& run = runs[k];
    const char* from = stored + run.byte;
    float* to = weights + run.first;
    if (run.precision == Precision::bfloat16)
      widen_run(reinterpret_cast<const Bf16*>(from), run.count, to);
    else if (run.precision == Precision::float16)
      widen_run(reinterpret_cast<const Half*>(from), run.count, to);
    else
      __builtin_memcpy(to, from, sizeof(float) * static_cast<size_t>(run.count));
  }
}

static void narrow(const WeightRun* runs, int32_t num_runs, const float* weights, char* stored) {
  for (int k = 0; k < num_runs; ++k) {
    const WeightRun& run = runs[k];
    const float* from = weights + run.first;
    char* to = stored + run.byte;
    if (run.precision == Precision::bfloat16)
      narrow_run(from, run.count, reinterpret_cast<Bf16*>(to));
    else if (run.precision == Precision::float16)
      narrow_run(from, run.count, reinterpret_cast<Half*>(to));
    else
      __builtin_memcpy(to, from, sizeof(float) * static_cast<size_t>(run.count));
  }
}

// Stores the weights of a row after a step, rounded as its segments want.
static void store_step(const TableView& table, const float* weights, int64_t id, uint64_t step, char* stored) {
  for (int k = 0; k < table.num_runs; ++k) {
    const WeightRun& run = table.runs[k];
    if (!run.stochastic || run.precision == Precision::float32) {
      narrow(&run, 1, weights, stored);
      continue;
    }
    const uint64_t key = rounding_key(table.key, id, step);
    const float* from = weights + run.first;
    if (run.precision == Precision::bfloat16)
      narrow_run(from, run, key, reinterpret_cast<Bf16*>(stored + run.byte));
    else
      narrow_run(from, run, key, reinterpret_cast<Half*>(stored + run.byte));
  }
}

// Whether the weights of a row are stored as float32 without gaps.
static inline bool stored_wide(const TableView& table) {
  return table.one_precision && table.runs[0].precision == Precision::float32;
}
