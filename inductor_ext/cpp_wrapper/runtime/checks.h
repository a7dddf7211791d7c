// The checks of a model's inputs: what the tables of a model's unit consist of, and what reads them.
//
// A model's unit holds constant tables only, which cpp_wrapper/codegen/input_checks.py writes, so
// that compiling it costs nothing. The code that reads them, with the text of every error, is
// checks.cpp, compiled once. All tables are plain data without initialisers that run.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

namespace inductor_ext {

// How a size or a stride is known.
enum class Rule : int32_t {
  fixed,    // it is `value`
  define,   // it is the value of the symbol `index`, which nothing before it has given
  same,     // it has to be the value of the symbol `index`
  derived,  // it has to be what the program at `index` gives
  solve,    // the symbol `index` is such that solve number `value` gives it
};

struct Extent {
  Rule rule;
  int32_t index;
  int64_t value;
  const char* text;  // in words of the model, where it is an expression
};

// size = scale * symbol + shift; both are programs over symbols that are known by then.
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
  Number number;         // what a tensor stands for that is no tensor to the model
  bool late;             // whether a size or stride is derived
};

// In the order in which inputs give them their values.
struct Symbol {
  const char* text;  // in words of the model
  int64_t min;
  int64_t max;
  int32_t input;
  int32_t dimension;
  bool stride;
  bool plain;  // it stands there itself, and is not solved for
};

struct Constraint {
  const char* text;
  int32_t program;
  int32_t symbol;  // where it says that one symbol is a multiple of `multiple`; else -1
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

// Throws std::runtime_error, which names the input, what was expected and what came, unless the
// tensors are what the compiled code takes.
//
// values: room for one number for each symbol; all are set when it returns.
// device_index: that of the device which the model runs on; -1 where it is not known, and then
// tensors that are not on the CPU have to be together. Where tables name an index, it counts.
void check_tensors(
    const Checks& checks,
    AtenTensorHandle const* tensors,
    int64_t count,
    int32_t device_index,
    int64_t* values);

}  // namespace inductor_ext
