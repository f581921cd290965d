// hyper: momentum, weight decay, nesterov (0 or 1)
struct MomentumRule {
  static constexpr int kStates = 1;

  template <class V>
  static void step(const float* hyper, float lr, V& w, V* state, V g) {
    V before = state[0];
    V velocity = hyper[0] * before - lr * (g + hyper[1] * w);
    state[0] = velocity;
    if (hyper[2] != 0.0f)
      w = w + ((1.0f + hyper[0]) * velocity - hyper[0] * before);
    else
      w = w + velocity;
  }
};
using Momentum = Elementwise<MomentumRule>;
