// Averages the interval between the steps in which an id occurs; the gradient is not used.
// State: the last step t = high * 2^24 + low, because a float holds integers only up to 2^24.
struct BatchSoftmax {
  static int state_size(const SegmentPlan&) { return 2; }

  template <int Dim>
  static void step(const SegmentPlan& plan, const SegmentStep& at, float* w, float* s, float*) {
    const int dim = Dim ? Dim : plan.dim;
    const int64_t t = at.step + 1, before = (static_cast<int64_t>(s[0]) << 24) + static_cast<int64_t>(s[1]);
    const float interval = static_cast<float>(t - before);
    for (int i = 0; i < dim; ++i) w[i] = (1.0f - at.lr) * w[i] + at.lr * interval;
    s[0] = static_cast<float>(t >> 24);
    s[1] = static_cast<float>(t & ((1 << 24) - 1));
  }
};
