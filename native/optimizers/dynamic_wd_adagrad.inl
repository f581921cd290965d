// hyper: eps, weight decay added to the gradient, decoupled weight decay
struct DynamicWdAdagradRule {
  static constexpr int kStates = 1;

  template <class V>
  static void step(const float* hyper, float lr, V& w, V* state, V g) {
    g = g + hyper[1] * w;
    state[0] = state[0] + g * g;
    w = w - (lr * g / (root(state[0]) + hyper[0]) + lr * hyper[2] * w);
  }
};
using DynamicWdAdagrad = Elementwise<DynamicWdAdagradRule>;
