// Both variants. State: mean or decayed sum of squared gradients.
// hyper: alpha, factor of the new square (1 - alpha or 1), eps, weight decay
struct RmsPropRule {
  static constexpr int kStates = 1;

  template <class V>
  static void step(const float* hyper, float lr, V& w, V* state, V g) {
    g = g + hyper[3] * w;
    state[0] = hyper[0] * state[0] + hyper[1] * (g * g);
    w = w - lr * g / (root(state[0]) + hyper[2]);
  }
};
using RmsProp = Elementwise<RmsPropRule>;
