// The gradient is a value. hyper: momentum, 1 - momentum
struct MovingAverageRule {
  static constexpr int kStates = 0;

  template <class V>
  static void step(const float* hyper, float, V& w, V*, V g) {
    w = hyper[0] * w + hyper[1] * g;
  }
};
using MovingAverage = Elementwise<MovingAverageRule>;
