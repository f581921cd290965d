using StepFunction = void (*)(const SegmentPlan&, const SegmentStep&, float* weights, float* state, float* gradient);
static StepFunction step_function(const SegmentPlan&);
static int state_size(const SegmentPlan&);

#include "elementwise.inl"

#include "adadelta.inl"
#include "adagrad.inl"
#include "adam.inl"
#include "batch_softmax.inl"
#include "custom.inl"
#include "delay_compensated.inl"
#include "dynamic_wd_adagrad.inl"
#include "ftrl.inl"
#include "group_adagrad.inl"
#include "group_ftrl.inl"
#include "lamb.inl"
#include "lion.inl"
#include "momentum.inl"
#include "moving_average.inl"
#include "rmsprop.inl"
#include "rowwise_adagrad.inl"
#include "sgd.inl"

#include "dispatch.inl"
