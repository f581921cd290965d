// Vectors of eight numbers on every CPU: the compiler lowers Vec8 to the registers of the target.
// Included inside an anonymous namespace of one instruction set.

// GCC treats a function that only prefetches as one without side effects and removes calls to it; forced inlining
// happens before that.
#define MEGALITH_PREFETCHER static inline __attribute__((always_inline)) void

typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec8Unaligned __attribute__((vector_size(32), aligned(4)));

static inline Vec8 load8(const float* p) { return *reinterpret_cast<const Vec8Unaligned*>(p); }
static inline void store8(float* p, Vec8 v) { *reinterpret_cast<Vec8Unaligned*>(p) = v; }

typedef double Double8 __attribute__((vector_size(64)));
typedef double Double8Unaligned __attribute__((vector_size(64), aligned(8)));

static inline Double8 load8(const double* p) { return *reinterpret_cast<const Double8Unaligned*>(p); }
static inline void store8(double* p, Double8 v) { *reinterpret_cast<Double8Unaligned*>(p) = v; }

template <class T>
struct Eight;
template <>
struct Eight<float> {
  typedef Vec8 type;
  typedef int32_t Mask __attribute__((vector_size(32)));
};
template <>
struct Eight<double> {
  typedef Double8 type;
  typedef int64_t Mask __attribute__((vector_size(64)));
};

static inline float root(float x) { return __builtin_sqrtf(x); }
static inline Vec8 root(Vec8 x) {
#if defined(__AVX__)
  return reinterpret_cast<Vec8>(_mm256_sqrt_ps(reinterpret_cast<__m256>(x)));
#else
  for (int lane = 0; lane < 8; ++lane) x[lane] = __builtin_sqrtf(x[lane]);
  return x;
#endif
}

// condition ? a : b, per lane.
static inline float choose(bool condition, float a, float b) { return condition ? a : b; }
typedef int32_t Mask8 __attribute__((vector_size(32)));
static inline Vec8 choose(Mask8 condition, Vec8 a, Vec8 b) { return condition ? a : b; }

static inline float broadcast(float x, float) { return x; }
static inline Vec8 broadcast(float x, Vec8) { return Vec8{x, x, x, x, x, x, x, x}; }

// The sum of (x + decay * w)^2 in a fixed order: eight lanes, then a tree over the lanes.
static inline float sum_of_squares(const float* x, const float* w, float decay, int n) {
  Vec8 lanes = {};
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    Vec8 v = load8(x + i) + decay * load8(w + i);
    lanes = lanes + v * v;
  }
  float rest[8] = {};
  for (int lane = 0; lane < n - i; ++lane) rest[lane] = x[i + lane] + decay * w[i + lane];
  lanes = lanes + load8(rest) * load8(rest);
  float a = lanes[0] + lanes[4], b = lanes[1] + lanes[5];
  float c = lanes[2] + lanes[6], d = lanes[3] + lanes[7];
  return (a + c) + (b + d);
}
