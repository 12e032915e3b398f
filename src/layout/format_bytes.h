// Numbers of bytes for people.
#ifndef TIDE_LAYOUT_FORMAT_BYTES_H_
#define TIDE_LAYOUT_FORMAT_BYTES_H_

#include <cstdint>
#include <string>

namespace tide {

// In the largest binary unit that leaves at least 1, with one decimal unless it is zero: "0 B",
// "768 B", "1.5 KiB", "64 MiB". `bytes` >= 0.
std::string FormatBytes(int64_t bytes);

}  // namespace tide

#endif  // TIDE_LAYOUT_FORMAT_BYTES_H_
