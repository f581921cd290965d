// Runs an optimizer whose rule is the same for every weight: eight weights at a time, then the rest.
// The state arrays are concatenated; each is as long as the segment.

template <class Rule, int Dim>
static void elementwise_step(const SegmentPlan& plan, float lr, float* w, float* s, const float* g) {
  const int dim = Dim ? Dim : plan.dim;
  int i = 0;
  for (; i + 8 <= dim; i += 8) {
    Vec8 weight = load8(w + i);
    Vec8 state[Rule::kStates ? Rule::kStates : 1];
    for (int k = 0; k < Rule::kStates; ++k) state[k] = load8(s + k * dim + i);
    Rule::step(plan.hyper, lr, weight, state, load8(g + i));
    store8(w + i, weight);
    for (int k = 0; k < Rule::kStates; ++k) store8(s + k * dim + i, state[k]);
  }
  for (; i < dim; ++i) {
    float state[Rule::kStates ? Rule::kStates : 1];
    for (int k = 0; k < Rule::kStates; ++k) state[k] = s[k * dim + i];
    Rule::step(plan.hyper, lr, w[i], state, g[i]);
    for (int k = 0; k < Rule::kStates; ++k) s[k * dim + i] = state[k];
  }
}

template <class Rule>
struct Elementwise {
  static int state_size(int dim) { return Rule::kStates * dim; }
  static void initial_state(const SegmentPlan& plan, float* state) {
    for (int k = 0; k < Rule::kStates; ++k)
      for (int i = 0; i < plan.dim; ++i) state[k * plan.dim + i] = Rule::initial(plan.hyper, k);
  }
  template <int Dim>
  static void step(const SegmentPlan& plan, float lr, float* w, float* s, const float* g) {
    elementwise_step<Rule, Dim>(plan, lr, w, s, g);
  }
};
