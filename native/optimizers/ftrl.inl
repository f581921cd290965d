// State: n (sum of squares), z. hyper: beta, l1, l2
struct FtrlRule {
  static constexpr int kStates = 2;

  template <class V>
  static void step(const float* hyper, float lr, V& w, V* state, V g) {
    const V zero = broadcast(0.0f, w), l1 = broadcast(hyper[1], w);
    V n = state[0] + g * g;
    V sigma = (root(n) - root(state[0])) / lr;
    V z = state[1] + (g - sigma * w);
    V shrunk = choose(z < zero, z + l1, z - l1);  // z, moved towards zero by l1
    V magnitude = choose(z < zero, -z, z);
    state[0] = n;
    state[1] = z;
    w = choose(magnitude > l1, -lr * shrunk / (root(n) + hyper[0] + hyper[2] * lr), zero);
  }
};
using Ftrl = Elementwise<FtrlRule>;
