#include "elementwise.inl"

#include "adagrad.inl"
#include "adam.inl"
#include "ftrl.inl"
#include "momentum.inl"
#include "rowwise_adagrad.inl"
#include "sgd.inl"
