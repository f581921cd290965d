// State: one sum for the whole segment, of the mean squared gradient.
// hyper: initial accumulator, eps, weight decay
struct RowWiseAdagrad {
  static int state_size(int) { return 1; }
  static void initial_state(const SegmentPlan& plan, float* state) { state[0] = plan.hyper[0]; }

  template <int Dim>
  static void step(const SegmentPlan& plan, float lr, float* w, float* sum, const float* g) {
    const int dim = Dim ? Dim : plan.dim;
    const float decay = plan.hyper[2];
    *sum = *sum + sum_of_squares(g, w, decay, dim) / static_cast<float>(dim);
    const float denominator = root(*sum) + plan.hyper[1];
    int i = 0;
    for (; i + 8 <= dim; i += 8) {
      Vec8 x = load8(w + i);
      store8(w + i, x - lr * (load8(g + i) + decay * x) / denominator);
    }
    for (; i < dim; ++i) w[i] = w[i] - lr * (g[i] + decay * w[i]) / denominator;
  }
};
