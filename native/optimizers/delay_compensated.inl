// Wraps another optimizer. State: the change of the weights in the last update, then the state of the base.
// hyper: strength, then those of the base
struct DelayCompensated {
  static SegmentPlan base_of(const SegmentPlan& plan) {
    SegmentPlan base = plan;
    base.optimizer = plan.base;
    base.base = -1;
    for (int k = 0; k + 1 < kMaxHyper; ++k) base.hyper[k] = plan.hyper[k + 1];
    return base;
  }
  static int state_size(const SegmentPlan& plan) { return plan.dim + megalith::MEGALITH_ISA::state_size(base_of(plan)); }

  template <int Dim>
  static void step(const SegmentPlan& plan, const SegmentStep& at, float* w, float* change, float* g) {
    const int dim = Dim ? Dim : plan.dim;
    const SegmentPlan base = base_of(plan);
    for (int i = 0; i < dim; ++i) {
      g[i] = g[i] + plan.hyper[0] * (g[i] * g[i]) * change[i];
      change[i] = w[i];
    }
    step_function(base)(base, at, w, change + dim, g);
    for (int i = 0; i < dim; ++i) change[i] = w[i] - change[i];
  }
};
