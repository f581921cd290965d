struct SgdRule {
  static constexpr int kStates = 0;

  template <class V>
  static void step(const float*, float lr, V& w, V*, V g) {
    w = w - lr * g;
  }
};
using Sgd = Elementwise<SgdRule>;
