// State: one sum for the whole segment, of the largest squared gradient. hyper: beta, l2, weight decay
struct GroupAdagrad {
  static int state_size(const SegmentPlan&) { return 1; }

  template <int Dim>
  static void step(const SegmentPlan& plan, const SegmentStep& at, float* w, float* sum, float* g) {
    const int dim = Dim ? Dim : plan.dim;
    const float l2 = plan.hyper[1], decay = plan.hyper[2];
    float largest = 0.0f;
    for (int i = 0; i < dim; ++i) {
      g[i] = g[i] + decay * w[i];
      largest = g[i] * g[i] > largest ? g[i] * g[i] : largest;
    }
    *sum = *sum + largest;
    const float rate = at.lr / (plan.hyper[0] + root(*sum));
    for (int i = 0; i < dim; ++i) g[i] = g[i] - w[i] / rate;
    const float norm = root(sum_of_squares(g, g, 0.0f, dim));
    const float factor = norm <= l2 ? 0.0f : -rate * ((norm - l2) / norm);
    for (int i = 0; i < dim; ++i) w[i] = factor == 0.0f ? 0.0f : factor * g[i];
  }
};
