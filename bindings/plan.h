// The planning part of tide._core: nothing here touches a fabric.
#ifndef TIDE_BINDINGS_PLAN_H_
#define TIDE_BINDINGS_PLAN_H_

#include <nanobind/nanobind.h>

void BindPlan(nanobind::module_& m);
void BindSim(nanobind::module_& m);
void BindVerify(nanobind::module_& m);

#endif  // TIDE_BINDINGS_PLAN_H_
