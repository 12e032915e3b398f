// Rates of the CUDA kernels for budgets of thread blocks (CTAs).
//
//   build/bench/bin/cuda_kernels_bench [--json=result.json]
//
// GB/s count bytes read plus bytes written. Every buffer set exceeds the second-level cache. A
// point is the median over repetitions, each of enough launches for some milliseconds, after a
// warm-up. Prints a table and writes all points, with the device and versions, as JSON.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/kernels.h"
#include "tide/error.h"

namespace tide::kernels::cuda {
namespace {

constexpr int kBudgets[] = {1, 2, 4, 8, 16, 32, 64, 132};
constexpr int kRepetitions = 9;
constexpr double kRepetitionMs = 4;

// What is summed: `n_items` equal pieces of `elems` elements in all.
struct Work {
  std::string name;
  DType dst_dtype = DType::kF32;
  DType src_dtype = DType::kBF16;
  int n_sources = 2;
  bool accumulate = false;
  int64_t elems = int64_t{64} << 20;
  int n_items = 1;
};

const Work kWorks[] = {
    // The owner's own gradient and one or seven staged pieces: 2 or 8 ranks in a node.
    {.name = "sum_of_2"},
    {.name = "sum_of_8", .n_sources = 8},
    {.name = "sum_of_8_in_4096_tensors", .n_sources = 8, .n_items = 4096},
    {.name = "sum_of_2_fp32", .src_dtype = DType::kF32},
    {.name = "land_8_accumulating",
     .src_dtype = DType::kF32,
     .n_sources = 8,
     .accumulate = true,
     .elems = int64_t{32} << 20},
    {.name = "cast_fp32_to_bf16",
     .dst_dtype = DType::kBF16,
     .src_dtype = DType::kF32,
     .n_sources = 1},
};

int64_t BytesMoved(const Work& work) {
  const auto src = static_cast<int64_t>(ItemSize(work.src_dtype));
  const auto dst = static_cast<int64_t>(ItemSize(work.dst_dtype));
  return work.elems * (src * work.n_sources + dst * (work.accumulate ? 2 : 1));
}

// Finite values of either type, not compressible to a few: zeros run faster than real data.
void Fill(const DeviceMemory& memory, uint32_t seed) {
  std::vector<uint16_t> host(memory.bytes() / 2);
  uint32_t state = seed;
  for (uint16_t& value : host) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<uint16_t>(0x3C00u | (state >> 16 & 0x83FFu));
  }
  const_cast<DeviceMemory&>(memory).CopyFrom(host.data());
}

struct Buffers {
  std::vector<std::unique_ptr<DeviceMemory>> memory;
  std::vector<const void*> bases;  // dst, then the sources

  explicit Buffers(const Work& work) {
    for (int i = 0; i <= work.n_sources; ++i) {
      const DType dtype = i == 0 ? work.dst_dtype : work.src_dtype;
      memory.push_back(
          std::make_unique<DeviceMemory>(static_cast<size_t>(work.elems) * ItemSize(dtype)));
      Fill(*memory.back(), static_cast<uint32_t>(i) + 1);
      bases.push_back(memory.back()->data());
    }
  }
};

std::vector<SumItem> MakeItems(const Work& work) {
  std::vector<SumItem> items;
  const int64_t elems = work.elems / work.n_items;
  for (int i = 0; i < work.n_items; ++i) {
    const auto at = [&](int base, DType dtype) {
      return Operand{base, i * elems * static_cast<int64_t>(ItemSize(dtype))};
    };
    SumItem item{.dst = at(0, work.dst_dtype),
                 .elems = elems,
                 .dst_dtype = work.dst_dtype,
                 .src_dtype = work.src_dtype};
    for (int s = 1; s <= work.n_sources; ++s) item.sources.push_back(at(s, work.src_dtype));
    items.push_back(std::move(item));
  }
  return items;
}

// Milliseconds of one launch in each repetition.
std::vector<double> Measure(const SumBatch& batch, const Buffers& buffers, const SumCall& call) {
  const OwnedStream stream;
  StreamTimer timer;
  const auto time = [&](int launches) {
    timer.Start(stream.get());
    for (int i = 0; i < launches; ++i) batch.Launch(buffers.bases.data(), call, stream.get());
    timer.Stop(stream.get());
    return timer.Milliseconds() / launches;
  };
  time(1);
  const int launches = std::max(1, static_cast<int>(std::ceil(kRepetitionMs / time(1))));
  std::vector<double> result;
  for (int r = 0; r < kRepetitions; ++r) result.push_back(time(launches));
  std::sort(result.begin(), result.end());
  return result;
}

nlohmann::json MeasurePath(const Work& work, SumPath path, const Buffers& buffers) {
  nlohmann::json points = nlohmann::json::array();
  const SumBatch batch(MakeItems(work), path);
  for (const int ctas : kBudgets) {
    const auto times =
        Measure(batch, buffers, {.scale = 0.125f, .accumulate = work.accumulate, .ctas = ctas});
    const double median = times[times.size() / 2];
    const double rate = static_cast<double>(BytesMoved(work)) / median * 1e-6;
    std::printf("%-26s %-10s %5d CTAs %9.3f ms %8.1f GB/s %7.1f a CTA\n", work.name.c_str(),
                Name(path), ctas, median, rate, rate / ctas);
    points.push_back({{"work", work.name},
                      {"path", Name(path)},
                      {"sources", work.n_sources},
                      {"source_dtype", Name(work.src_dtype)},
                      {"dst_dtype", Name(work.dst_dtype)},
                      {"accumulate", work.accumulate},
                      {"elems", work.elems},
                      {"items", work.n_items},
                      {"ctas", ctas},
                      {"bytes", BytesMoved(work)},
                      {"ms", times},
                      {"ms_median", median},
                      {"gb_per_s", rate},
                      {"gb_per_s_per_cta", rate / ctas}});
  }
  return points;
}

nlohmann::json MeasureAll() {
  const DeviceInfo device = CurrentDevice();
  nlohmann::json result = {{"bench", "cuda_kernels"},
                           {"device", device.name},
                           {"capability", device.capability},
                           {"multiprocessors", device.multiprocessors},
                           {"shared_bytes", device.shared_bytes},
                           {"driver", device.driver_version},
                           {"runtime", device.runtime_version},
                           {"repetitions", kRepetitions},
                           {"points", nlohmann::json::array()}};
  for (const Work& work : kWorks) {
    const Buffers buffers(work);
    for (const SumPath path : {SumPath::kPlain, SumPath::kBulk}) {
      try {
        for (auto& point : MeasurePath(work, path, buffers)) result["points"].push_back(point);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kUnsupported) throw;
        std::printf("%s %s: %s\n", work.name.c_str(), Name(path), error.what());
      }
    }
  }
  return result;
}

int Main(int argc, char** argv) {
  if (const std::string reason = NoDeviceReason(); !reason.empty()) {
    std::printf("cuda_kernels_bench: nothing to measure without a GPU: %s\n", reason.c_str());
    return 0;
  }
  const nlohmann::json result = MeasureAll();
  const std::string flag = "--json=";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (!argument.starts_with(flag)) continue;  // of the other benches
    const std::string path = argument.substr(flag.size());
    std::ofstream out(path);
    out << result.dump(1) << '\n';
    if (!out.flush()) {
      std::fprintf(stderr, "cuda_kernels_bench: can't write %s\n", path.c_str());
      return 1;
    }
    std::printf("written: %s\n", path.c_str());
  }
  return 0;
}

}  // namespace
}  // namespace tide::kernels::cuda

int main(int argc, char** argv) {
  try {
    return tide::kernels::cuda::Main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cuda_kernels_bench: %s\n", error.what());
    return 1;
  }
}
