// State: one sum for the whole segment, of the mean squared gradient.
// hyper: eps, weight decay
struct RowWiseAdagrad {
  static int state_size(const SegmentPlan&) { return 1; }

  template <int Dim>
  static void step(const SegmentPlan& plan, const SegmentStep& at, float* w, float* sum, float* g) {
    const int dim = Dim ? Dim : plan.dim;
    const float lr = at.lr, decay = plan.hyper[1];
    *sum = *sum + sum_of_squares(g, w, decay, dim) / static_cast<float>(dim);
    const float denominator = root(*sum) + plan.hyper[0];
    int i = 0;
    for (; i + 8 <= dim; i += 8) {
      Vec8 x = load8(w + i);
      store8(w + i, x - lr * (load8(g + i) + decay * x) / denominator);
    }
    for (; i < dim; ++i) w[i] = w[i] - lr * (g[i] + decay * w[i]) / denominator;
  }
};
