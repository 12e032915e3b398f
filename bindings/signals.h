// Ctrl-C in calls that have released the GIL.
#ifndef TIDE_BINDINGS_SIGNALS_H_
#define TIDE_BINDINGS_SIGNALS_H_

#include <nanobind/nanobind.h>

// Raises what a signal handler raises, KeyboardInterrupt above all. Python runs handlers on its
// main thread alone.
inline void CheckSignals() {
  const nanobind::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) nanobind::raise_python_error();
}

#endif  // TIDE_BINDINGS_SIGNALS_H_
