// Initial rows. Every operation has one IEEE rounding (add, multiply, square root) and they run in the order
// written, so that every engine can produce the same bits.

static float natural_log(float y) {  // y normal and positive
  uint32_t bits;
  __builtin_memcpy(&bits, &y, 4);
  int32_t exponent = static_cast<int32_t>(bits >> 23) - 126;
  bits = (bits & 0x007fffffu) | 0x3f000000u;
  float m;
  __builtin_memcpy(&m, &bits, 4);  // in [0.5, 1)
  if (m < 0.70710677f) {
    exponent -= 1;
    m = m + m;
  }
  m = m - 1.0f;
  const float e = static_cast<float>(exponent);
  const float square = m * m;
  float p = 7.0376836e-2f;
  p = p * m + -1.1514610e-1f;
  p = p * m + 1.1676999e-1f;
  p = p * m + -1.2420141e-1f;
  p = p * m + 1.4249323e-1f;
  p = p * m + -1.6668058e-1f;
  p = p * m + 2.0000714e-1f;
  p = p * m + -2.4999994e-1f;
  p = p * m + 3.3333331e-1f;
  float tail = p * m * square;
  tail = tail + e * -2.1219444e-4f;
  tail = tail + square * -0.5f;
  return (m + tail) + e * 0.69335938f;
}

// The inverse of the error function (two polynomials, one for the centre, one for the tail).
static float inverse_erf(float x) {
  float w = -natural_log((1.0f - x) * (1.0f + x));
  float p;
  if (w < 5.0f) {
    w = w - 2.5f;
    p = 2.8102264e-08f;
    p = p * w + 3.4327394e-07f;
    p = p * w + -3.5233877e-06f;
    p = p * w + -4.3915065e-06f;
    p = p * w + 0.00021858087f;
    p = p * w + -0.0012537250f;
    p = p * w + -0.0041776816f;
    p = p * w + 0.24664073f;
    p = p * w + 1.5014094f;
  } else {
    w = root(w) - 3.0f;
    p = -0.00020021426f;
    p = p * w + 0.00010095056f;
    p = p * w + 0.0013493432f;
    p = p * w + -0.0036734284f;
    p = p * w + 0.0057395077f;
    p = p * w + -0.0076224613f;
    p = p * w + 0.0094388705f;
    p = p * w + 1.0016741f;
    p = p * w + 2.8329768f;
  }
  return p * x;
}

static float initial_value(const SegmentPlan& s, uint64_t key, uint32_t column) {
  const float ulp = 5.9604645e-08f;  // 2^-24
  switch (s.init) {
    case InitKind::constant:
      return s.init_a;
    case InitKind::uniform:
      return s.init_a + s.init_b * (static_cast<float>(draw24(key, column)) * ulp);
    default: {
      int32_t odd = 2 * static_cast<int32_t>(draw24(key, column)) + 1 - (1 << 24);
      float x = static_cast<float>(odd) * ulp;  // the centre of one of 2^24 cells of (-1, 1)
      if (s.init == InitKind::normal) return s.init_a + s.init_b * (1.4142135f * inverse_erf(x));
      float z = 1.4142135f * inverse_erf(x * 0.95449974f);  // the probability within two standard deviations
      z = z < -2.0f ? -2.0f : z > 2.0f ? 2.0f : z;
      return s.init_a + s.init_b * z;
    }
  }
}

// The weights of a new row before they are rounded to the precision of their segments.
static void draw_weights(const TableView& table, int64_t id, float* out) {
  const uint64_t key = row_key(table.key, id);
  for (int k = 0; k < table.num_segments; ++k) {
    const SegmentPlan& s = table.segments[k];
    for (int i = 0; i < s.dim; ++i)
      out[s.offset + i] = initial_value(s, key, static_cast<uint32_t>(s.offset + i));
  }
}

// The weights of a new row. `scratch`: [dim], not used by a table of float32.
static void initial_weights(const TableView& table, int64_t id, float* out, char* scratch) {
  draw_weights(table, id, out);
  if (stored_wide(table)) return;
  narrow(table.runs, table.num_runs, out, scratch);
  widen(table.runs, table.num_runs, scratch, out);
}

static void initialize(const TableView& table, const int32_t* rows, const int64_t* ids, int64_t n, float* scratch) {
  const bool wide = stored_wide(table);
  for (int64_t i = 0; i < n; ++i) {
    char* stored = weights_at(table.rows, rows[i]);
    draw_weights(table, ids[i], wide ? reinterpret_cast<float*>(stored) : scratch);
    if (!wide) narrow(table.runs, table.num_runs, scratch, stored);
    float* state = state_at(table.rows, rows[i]);
    for (int k = 0; k < table.num_segments; ++k) {
      const SegmentPlan& s = table.segments[k];
      for (int i = 0; i < s.state_size; ++i) state[s.state_offset + i] = s.initial_state[i];
    }
  }
}
