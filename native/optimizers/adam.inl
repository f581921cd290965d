// Adam, AdamW and AMSGrad. State: m, v, for AMSGrad the largest v, then the update count of the row if the bias
// correction is by row.
// hyper: beta1, beta2, 1 - beta1, 1 - beta2, eps, weight decay, options (1: count per row, 2: nesterov, 4: decoupled
// weight decay). LAMB has the same.

struct AdamNumbers {
  float rate;   // learning rate and bias correction
  float decay;  // weight decay that is added to the gradient
  float keep;   // factor of the weight: decoupled weight decay
  bool nesterov;
};

template <bool Max>
struct AdamRule {
  static constexpr int kStates = Max ? 3 : 2;

  template <class V>
  static void step(const float* hyper, const AdamNumbers& x, V& w, V* state, V g) {
    g = g + x.decay * w;
    state[0] = state[0] + (g - state[0]) * hyper[2];
    state[1] = state[1] + (g * g - state[1]) * hyper[3];
    V m = state[0], v = state[1];
    if (x.nesterov) m = hyper[2] * g + hyper[0] * m;
    if (Max) v = state[kStates - 1] = choose(v > state[kStates - 1], v, state[kStates - 1]);
    w = x.keep * w - x.rate * m / (root(v) + hyper[4]);
  }
};

static inline bool counts_rows(const SegmentPlan& plan) { return static_cast<int>(plan.hyper[6]) & 1; }

// The bias correction of a step: by the row's own updates, or by the global step.
static inline float bias_correction(const SegmentPlan& plan, const SegmentStep& at, float* count) {
  if (!counts_rows(plan)) return at.correction;
  *count = *count + 1.0f;
  const double t = static_cast<double>(*count);
  return static_cast<float>(__builtin_sqrt(1.0 - __builtin_pow(static_cast<double>(plan.hyper[1]), t)) /
                            (1.0 - __builtin_pow(static_cast<double>(plan.hyper[0]), t)));
}

template <bool Max>
struct AdamOf {
  static int state_size(const SegmentPlan& plan) {
    return AdamRule<Max>::kStates * plan.dim + (counts_rows(plan) ? 1 : 0);
  }

  template <int Dim>
  static void step(const SegmentPlan& plan, const SegmentStep& at, float* w, float* s, float* g) {
    const int dim = Dim ? Dim : plan.dim, options = static_cast<int>(plan.hyper[6]);
    const bool decoupled = options & 4;
    const float correction = bias_correction(plan, at, s + AdamRule<Max>::kStates * dim);
    const AdamNumbers x{at.lr * correction, decoupled ? 0.0f : plan.hyper[5],
                        decoupled ? 1.0f - at.lr * plan.hyper[5] : 1.0f, (options & 2) != 0};
    elementwise_step<AdamRule<Max>, Dim>(plan, x, w, s, g);
  }
};
using Adam = AdamOf<false>;
using AmsGrad = AdamOf<true>;
