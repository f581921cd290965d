// State: n (sum of squares), z. hyper: beta, l1, l2
struct GroupFtrl {
  static int state_size(const SegmentPlan& plan) { return 2 * plan.dim; }

  template <int Dim>
  static void step(const SegmentPlan& plan, const SegmentStep& at, float* w, float* s, float* g) {
    const int dim = Dim ? Dim : plan.dim;
    const float lr = at.lr, l1 = plan.hyper[1];
    float *n = s, *z = s + dim;
    for (int i = 0; i < dim; ++i) {
      const float before = n[i];
      n[i] = before + g[i] * g[i];
      z[i] = z[i] + (g[i] - (root(n[i]) - root(before)) / lr * w[i]);
    }
    const float norm = root(sum_of_squares(z, z, 0.0f, dim));
    const float factor = norm <= l1 ? 0.0f : -lr * ((norm - l1) / norm);
    for (int i = 0; i < dim; ++i)  // a z of 0 may have a divisor of 0
      w[i] = factor == 0.0f || z[i] == 0.0f ? 0.0f
                                            : factor * z[i] / (root(n[i]) + plan.hyper[0] + plan.hyper[2] * lr);
  }
};
