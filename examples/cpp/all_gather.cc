// Four ranks, here threads of one process, gather two parameters straight into their places.
#include <tide/communicator.h>
#include <tide/config.h>
#include <tide/error.h>

#include <array>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kRanks = 4;
constexpr int kRows = 8;  // of either parameter: two a rank
constexpr int kShardRows = kRows / kRanks;
constexpr std::array<int, 2> kColumns = {3, 1};

// How the ranks exchange a few bytes at set-up. Between processes: a file, a socket, MPI.
class ThreadBootstrap final : public tide::Bootstrap {
 public:
  explicit ThreadBootstrap(int rank) : rank_(rank) {}
  int rank() const override { return rank_; }
  int world() const override { return kRanks; }
  std::vector<std::string> AllGather(const std::string& mine) override {
    box_[static_cast<size_t>(rank_)] = mine;
    barrier_.arrive_and_wait();
    std::vector<std::string> all = box_;
    barrier_.arrive_and_wait();
    return all;
  }

 private:
  static inline std::barrier<> barrier_{kRanks};
  static inline std::vector<std::string> box_{kRanks};
  int rank_;
};

// Row r of every parameter is filled with the number r.
std::vector<float> Shard(int rank, int columns) {
  std::vector<float> shard;
  for (int row = rank * kShardRows; row < (rank + 1) * kShardRows; ++row) {
    shard.insert(shard.end(), static_cast<size_t>(columns), static_cast<float>(row));
  }
  return shard;
}

void CheckLanded(const tide::GroupLayout& layout, const tide::SegmentView& landing) {
  for (size_t param = 0; param < kColumns.size(); ++param) {
    const auto* landed = reinterpret_cast<const float*>(static_cast<const char*>(landing.address) +
                                                        layout.params()[param].landing_offset);
    for (int i = 0; i < kRows * kColumns[param]; ++i) {
      if (landed[i] == static_cast<float>(i / kColumns[param])) continue;
      std::fprintf(stderr, "parameter %zu, element %d is %g\n", param, i, landed[i]);
      std::exit(1);
    }
  }
}

void Run(int rank) {
  ThreadBootstrap bootstrap(rank);
  tide::Communicator comm(bootstrap, tide::OptionsFromEnvironment());
  const int group = comm.RegisterGroup("layer", {{"weight", kRows, kColumns[0], tide::DType::kF32},
                                                 {"bias", kRows, kColumns[1], tide::DType::kF32}});
  const tide::GroupLayout& layout = comm.layout(group);
  const tide::SegmentView landing = comm.AddSegment(layout.landing_bytes(), "landing");
  const std::vector<float> weight = Shard(rank, kColumns[0]);
  const std::vector<float> bias = Shard(rank, kColumns[1]);
  comm.AllGather({group,
                  {weight.data(), bias.data()},
                  {tide::DType::kF32, tide::DType::kF32},
                  {landing.id, 0}});
  CheckLanded(layout, landing);
}

}  // namespace

int main() {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([rank] {
      try {
        Run(rank);
      } catch (const tide::Error& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        std::exit(1);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  std::printf("%d ranks gathered 2 parameters\n", kRanks);
}
