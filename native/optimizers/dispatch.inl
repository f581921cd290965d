// The functions of an optimizer by its position in the list of optimizers.hpp.

template <class Optimizer>
static StepFunction step_for_dim(int dim) {
  switch (dim) {
    case 1: return Optimizer::template step<1>;
    case 8: return Optimizer::template step<8>;
    case 16: return Optimizer::template step<16>;
    case 32: return Optimizer::template step<32>;
    case 64: return Optimizer::template step<64>;
    default: return Optimizer::template step<0>;
  }
}

static StepFunction step_function(const SegmentPlan& s) {
  int index = 0;
#define X(text, type) \
  if (s.optimizer == index++) return step_for_dim<type>(s.dim);
  MEGALITH_OPTIMIZERS(X)
#undef X
  return nullptr;
}

static int state_size(const SegmentPlan& s) {
  int index = 0;
#define X(text, type) \
  if (s.optimizer == index++) return type::state_size(s);
  MEGALITH_OPTIMIZERS(X)
#undef X
  return 0;
}
