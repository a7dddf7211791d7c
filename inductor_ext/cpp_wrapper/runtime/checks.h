// Checks of a model's inputs: the tables in a model's translation unit, and the function that reads
// them.
//
// codegen/input_checks.py writes the tables as constant data, which takes no time to compile and has
// no dynamic initialisation. checks.cpp, compiled once for all models, evaluates them.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

namespace inductor_ext {

// How a size or a stride is checked.
enum class Rule : int32_t {
  fixed,    // it must be `value`
  define,   // it assigns the symbol `index`, which has no value yet
  same,     // it must equal the symbol `index`
  derived,  // it must equal the result of the program at `index`
  solve,    // solve number `value` computes the symbol `index` from it
};

struct Extent {
  Rule rule;
  int32_t index;
  int64_t value;
  const char* text;  // the expression in the model's names; null without one
};

// size = scale * symbol + shift; both are programs over symbols that were assigned before.
struct Solve {
  int32_t scale;
  int32_t shift;
};

enum class Number : int32_t { none, integer, floating, boolean };

struct Input {
  const char* name;
  const char* shape_text;
  const Extent* sizes;
  const Extent* strides;
  int32_t rank;
  int32_t dtype;        // c10::ScalarType
  int32_t device_type;   // c10::DeviceType
  int32_t device_index;  // -1: that of the model
  Number number;         // not none: the model has a scalar, passed as a tensor of no dimensions
  bool late;             // whether a size or stride is derived
};

// In the order in which inputs assign them.
struct Symbol {
  const char* text;  // in the model's names
  int64_t min;
  int64_t max;
  int32_t input;
  int32_t dimension;
  bool stride;
  bool plain;  // whether the extent is the symbol itself, and not solved for it
};

struct Constraint {
  const char* text;
  int32_t program;
  int32_t symbol;  // the symbol that must be a multiple of `multiple`; -1: another constraint
  int64_t multiple;
};

struct Checks {
  const Input* inputs;
  int32_t input_count;
  const Symbol* symbols;
  int32_t symbol_count;
  const Constraint* constraints;
  int32_t constraint_count;
  const Solve* solves;
  const int64_t* programs;
};

// Throws Error(ErrorCode::input), whose text names the input, the expected and the actual value,
// unless the tensors match the tables.
//
// values: receives the value of every symbol.
// device_index: index of the model's device; -1 if unknown, in which case all tensors that are not on
// the CPU must be on the same device. An index in the tables takes precedence.
void check_tensors(
    const Checks& checks,
    AtenTensorHandle const* tensors,
    int64_t count,
    int32_t device_index,
    int64_t* values);

}  // namespace inductor_ext
