// An optimizer that is written in Python. The table keeps its state; its steps run outside (CpuEngine.update).
struct Custom {
  static int state_size(const SegmentPlan&) { return -1; }

  template <int Dim>
  static void step(const SegmentPlan&, const SegmentStep&, float*, float*, float*) {}
};
