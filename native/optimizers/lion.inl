// State: m. hyper: beta1, 1 - beta1, beta2, 1 - beta2, weight decay
struct LionRule {
  static constexpr int kStates = 1;

  template <class V>
  static void step(const float* hyper, float lr, V& w, V* state, V g) {
    const V zero = broadcast(0.0f, w), one = broadcast(1.0f, w);
    const V c = hyper[0] * state[0] + hyper[1] * g;
    const V sign = choose(c > zero, one, choose(c < zero, -one, zero));
    state[0] = hyper[2] * state[0] + hyper[3] * g;
    w = w - lr * (sign + hyper[4] * w);
  }
};
using Lion = Elementwise<LionRule>;
