// Optimizers by name. To add one: write optimizers/NAME.inl with a struct that has state_size and step
// (Elementwise<Rule> makes both from a rule for one weight), include it in optimizers/all.inl, and add a line to the
// list below. Initial values of states come from Python.
#pragma once

#include <cstring>

namespace megalith {

#define MEGALITH_OPTIMIZERS(X)              \
  X("sgd", Sgd)                             \
  X("momentum", Momentum)                   \
  X("adagrad", Adagrad)                     \
  X("rowwise_adagrad", RowWiseAdagrad)      \
  X("adam", Adam)                           \
  X("ftrl", Ftrl)                           \
  X("adamw", Adam)                          \
  X("amsgrad", AmsGrad)                     \
  X("lamb", Lamb)                           \
  X("lion", Lion)                           \
  X("adadelta", Adadelta)                   \
  X("rmsprop", RmsProp)                     \
  X("rmsprop_v2", RmsProp)                  \
  X("dynamic_wd_adagrad", DynamicWdAdagrad) \
  X("group_adagrad", GroupAdagrad)          \
  X("group_ftrl", GroupFtrl)                \
  X("moving_average", MovingAverage)        \
  X("batch_softmax", BatchSoftmax)          \
  X("delay_compensated", DelayCompensated)  \
  X("custom", Custom)

// Returns -1 if the name is unknown.
inline int optimizer_index(const char* name) {
  int index = 0;
#define X(text, type) \
  if (std::strcmp(name, text) == 0) return index; \
  ++index;
  MEGALITH_OPTIMIZERS(X)
#undef X
  return -1;
}

}  // namespace megalith
