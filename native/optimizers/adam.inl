// State: m, v, then the number of updates of the row.
// hyper: beta1, beta2, eps, weight decay
struct AdamRule {
  static constexpr int kStates = 2;

  template <class V>
  static void step(const float* hyper, float rate, V& w, V* state, V g) {
    g = g + hyper[3] * w;
    state[0] = state[0] + (g - state[0]) * (1.0f - hyper[0]);
    state[1] = state[1] + (g * g - state[1]) * (1.0f - hyper[1]);
    w = w - rate * state[0] / (root(state[1]) + hyper[2]);
  }
};

struct Adam {
  static int state_size(int dim) { return 2 * dim + 1; }
  static void initial_state(const SegmentPlan& plan, float* state) {
    for (int i = 0; i < 2 * plan.dim + 1; ++i) state[i] = 0.0f;
  }

  template <int Dim>
  static void step(const SegmentPlan& plan, float lr, float* w, float* s, const float* g) {
    float* count = s + 2 * (Dim ? Dim : plan.dim);
    *count = *count + 1.0f;
    double t = static_cast<double>(*count);
    double correction = __builtin_sqrt(1.0 - __builtin_pow(static_cast<double>(plan.hyper[1]), t)) /
                        (1.0 - __builtin_pow(static_cast<double>(plan.hyper[0]), t));
    elementwise_step<AdamRule, Dim>(plan, lr * static_cast<float>(correction), w, s, g);
  }
};
