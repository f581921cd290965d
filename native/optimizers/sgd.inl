struct SgdRule {
  static constexpr int kStates = 0;
  static float initial(const float*, int) { return 0.0f; }

  template <class V>
  static void step(const float*, float lr, V& w, V*, V g) {
    w = w - lr * g;
  }
};
using Sgd = Elementwise<SgdRule>;
