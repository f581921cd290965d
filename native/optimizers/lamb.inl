// State and hyper as for Adam. The step of a row has the length of the row's weights times the learning rate.
struct Lamb {
  static int state_size(const SegmentPlan& plan) { return Adam::state_size(plan); }

  template <class V>
  static V direction(const float* hyper, float correction, V w, V& m, V& v, V g) {
    m = m + (g - m) * hyper[2];
    v = v + (g * g - v) * hyper[3];
    return correction * m / (root(v) + hyper[4]) + hyper[5] * w;
  }

  template <int Dim>
  static void step(const SegmentPlan& plan, const SegmentStep& at, float* w, float* s, float* g) {
    const int dim = Dim ? Dim : plan.dim;
    const float correction = bias_correction(plan, at, s + 2 * dim);
    int i = 0;
    for (; i + 8 <= dim; i += 8) {
      Vec8 m = load8(s + i), v = load8(s + dim + i);
      store8(g + i, direction(plan.hyper, correction, load8(w + i), m, v, load8(g + i)));
      store8(s + i, m);
      store8(s + dim + i, v);
    }
    for (; i < dim; ++i) g[i] = direction(plan.hyper, correction, w[i], s[i], s[dim + i], g[i]);
    const float length = root(sum_of_squares(w, w, 0.0f, dim)), step = root(sum_of_squares(g, g, 0.0f, dim));
    const float rate = length > 0.0f && step > 0.0f ? at.lr * (length / step) : at.lr;
    for (i = 0; i < dim; ++i) w[i] = w[i] - rate * g[i];
  }
};
