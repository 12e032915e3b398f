// What a calibration measures with, and the rule that it feeds (python/tide/calibration).
#ifndef TIDE_BINDINGS_CALIBRATION_H_
#define TIDE_BINDINGS_CALIBRATION_H_

#include <nanobind/nanobind.h>

void BindCalibration(nanobind::module_& m);

#endif  // TIDE_BINDINGS_CALIBRATION_H_
