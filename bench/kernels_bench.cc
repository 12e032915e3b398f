// Bandwidth of the host kernels beside memcpy.
//
// Every thread plays a rank: it works through buffers of its own, piece by piece, all threads at
// once. "cold" buffers exceed the last-level cache, "warm" ones stay inside it. bytes_per_second
// counts what an operation reads plus what it writes, over all threads.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/host/kernels.h"

namespace tide::kernels {
namespace {

constexpr size_t kColdBytes = size_t{64} << 20;  // of each thread
constexpr size_t kWarmBytes = size_t{1} << 20;

enum class Mover { kMemcpy, kCopy };

template <Mover kMover, size_t kBytes>
void Move(benchmark::State& state) {
  const auto piece = static_cast<size_t>(state.range(0));
  const size_t bytes = std::max(piece, kBytes / piece * piece);
  const std::vector<uint8_t> src(bytes, 1);
  std::vector<uint8_t> dst(bytes, 2);
  for (auto _ : state) {
    for (size_t offset = 0; offset < bytes; offset += piece) {
      if constexpr (kMover == Mover::kMemcpy) {
        std::memcpy(dst.data() + offset, src.data() + offset, piece);
      } else {
        Copy(dst.data() + offset, src.data() + offset, piece);
      }
    }
    StoreFence();
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * bytes * 2));
}

// Sums `n` bf16 sources, `piece` output bytes a call, like the owner of a reduce-scatter block.
template <DType kOut>
void Reduce(benchmark::State& state) {
  const auto n = static_cast<size_t>(state.range(0));
  const auto piece_elems = static_cast<size_t>(state.range(1)) / ItemSize(kOut);
  const bool accumulate = state.range(2) != 0;
  const size_t total = kColdBytes / (2 * n + ItemSize(kOut));
  const size_t elems = std::max(piece_elems, total / piece_elems * piece_elems);
  const std::vector<std::vector<uint16_t>> sources(n, std::vector<uint16_t>(elems, 0x3F80));
  std::vector<uint8_t> out(elems * ItemSize(kOut));
  std::vector<const void*> pointers(n);
  for (auto _ : state) {
    for (size_t first = 0; first < elems; first += piece_elems) {
      for (size_t s = 0; s < n; ++s) pointers[s] = sources[s].data() + first;
      Sum(out.data() + first * ItemSize(kOut), kOut, pointers.data(), n, DType::kBF16, 0.25f,
          accumulate, piece_elems);
    }
    StoreFence();
    benchmark::ClobberMemory();
  }
  const size_t out_passes = accumulate ? 2 : 1;
  state.SetBytesProcessed(
      static_cast<int64_t>(state.iterations() * elems * (2 * n + out_passes * ItemSize(kOut))));
}

template <DType kTo, DType kFrom>
void Convert(benchmark::State& state) {
  const size_t elems = kColdBytes / (ItemSize(kTo) + ItemSize(kFrom));
  const std::vector<uint8_t> src(elems * ItemSize(kFrom), 1);
  std::vector<uint8_t> dst(elems * ItemSize(kTo));
  for (auto _ : state) {
    Cast(dst.data(), kTo, src.data(), kFrom, elems);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(
      static_cast<int64_t>(state.iterations() * elems * (ItemSize(kTo) + ItemSize(kFrom))));
}

void Pieces(benchmark::internal::Benchmark* bench) {
  bench->ArgName("piece")->Arg(16 << 10)->Arg(64 << 10)->Arg(1 << 20)->Arg(8 << 20)->UseRealTime();
  bench->Threads(1)->Threads(2)->Threads(4);
}

void Reductions(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"sources", "piece", "accumulate"})->UseRealTime()->Threads(1)->Threads(2);
  bench->Args({2, 1 << 20, 0})
      ->Args({4, 64 << 10, 0})
      ->Args({4, 1 << 20, 0})
      ->Args({4, 1 << 20, 1});
  bench->Args({8, 1 << 20, 0})->Args({16, 1 << 20, 0});
}

BENCHMARK_TEMPLATE(Move, Mover::kMemcpy, kColdBytes)->Name("memcpy/cold")->Apply(Pieces);
BENCHMARK_TEMPLATE(Move, Mover::kCopy, kColdBytes)->Name("copy/cold")->Apply(Pieces);
BENCHMARK_TEMPLATE(Move, Mover::kMemcpy, kWarmBytes)
    ->Name("memcpy/warm")
    ->Arg(256 << 10)
    ->Threads(4)
    ->UseRealTime();
BENCHMARK_TEMPLATE(Move, Mover::kCopy, kWarmBytes)
    ->Name("copy/warm")
    ->Arg(256 << 10)
    ->Threads(4)
    ->UseRealTime();
BENCHMARK_TEMPLATE(Reduce, DType::kF32)->Name("sum/bf16_to_fp32")->Apply(Reductions);
BENCHMARK_TEMPLATE(Reduce, DType::kBF16)->Name("sum/bf16_to_bf16")->Apply(Reductions);
BENCHMARK_TEMPLATE(Convert, DType::kBF16, DType::kF32)
    ->Name("cast/fp32_to_bf16")
    ->UseRealTime()
    ->Threads(1)
    ->Threads(4);
BENCHMARK_TEMPLATE(Convert, DType::kF32, DType::kBF16)
    ->Name("cast/bf16_to_fp32")
    ->UseRealTime()
    ->Threads(1)
    ->Threads(4);

}  // namespace
}  // namespace tide::kernels
