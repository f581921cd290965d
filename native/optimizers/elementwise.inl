// Runs an optimizer whose rule is the same for every weight: eight weights at a time, then the rest.
// The state arrays are concatenated; each is as long as the segment. `x` is what the rule needs besides the weight:
// the learning rate, or a struct.

template <class Rule, int Dim, class Numbers>
static void elementwise_step(const SegmentPlan& plan, const Numbers& x, float* w, float* s, const float* g) {
  const int dim = Dim ? Dim : plan.dim;
  int i = 0;
  for (; i + 8 <= dim; i += 8) {
    Vec8 weight = load8(w + i);
    Vec8 state[Rule::kStates ? Rule::kStates : 1];
    for (int k = 0; k < Rule::kStates; ++k) state[k] = load8(s + k * dim + i);
    Rule::step(plan.hyper, x, weight, state, load8(g + i));
    store8(w + i, weight);
    for (int k = 0; k < Rule::kStates; ++k) store8(s + k * dim + i, state[k]);
  }
  for (; i < dim; ++i) {
    float state[Rule::kStates ? Rule::kStates : 1];
    for (int k = 0; k < Rule::kStates; ++k) state[k] = s[k * dim + i];
    Rule::step(plan.hyper, x, w[i], state, g[i]);
    for (int k = 0; k < Rule::kStates; ++k) s[k * dim + i] = state[k];
  }
}

// An optimizer from a rule that needs the learning rate only.
template <class Rule>
struct Elementwise {
  static int state_size(const SegmentPlan& plan) { return Rule::kStates * plan.dim; }
  template <int Dim>
  static void step(const SegmentPlan& plan, const SegmentStep& at, float* w, float* s, float* g) {
    elementwise_step<Rule, Dim>(plan, at.lr, w, s, g);
  }
};
