// Class Communicator of the module, and the segments it gives.
#ifndef TIDE_BINDINGS_COMMUNICATOR_H_
#define TIDE_BINDINGS_COMMUNICATOR_H_

#include <nanobind/nanobind.h>

void BindCommunicator(nanobind::module_& m);

#endif  // TIDE_BINDINGS_COMMUNICATOR_H_
