// A sizing request as JSON (docs/memory.md lists the fields).
#ifndef TIDE_PLAN_REPORT_REQUEST_H_
#define TIDE_PLAN_REPORT_REQUEST_H_

#include <string>

#include "tide/sizing.h"

namespace tide::internal {

struct ReportRequest {
  SizingRequest sizing;
  int rank = 0;  // whose programs are counted
};

// Throws Error(kInvalidArgument) with the path of the offending field.
ReportRequest ParseReportRequest(const std::string& json);

}  // namespace tide::internal

#endif  // TIDE_PLAN_REPORT_REQUEST_H_
