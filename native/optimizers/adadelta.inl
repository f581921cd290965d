// State: mean of squared gradients, mean of squared steps. hyper: rho, 1 - rho, eps, weight decay
struct AdadeltaRule {
  static constexpr int kStates = 2;

  template <class V>
  static void step(const float* hyper, float lr, V& w, V* state, V g) {
    g = g + hyper[3] * w;
    state[0] = hyper[0] * state[0] + hyper[1] * (g * g);
    const V delta = root(state[1] + hyper[2]) / root(state[0] + hyper[2]) * g;
    state[1] = hyper[0] * state[1] + hyper[1] * (delta * delta);
    w = w - lr * delta;
  }
};
using Adadelta = Elementwise<AdadeltaRule>;
