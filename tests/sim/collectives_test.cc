// Planned collectives on a machine: what is true of every one of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "sim/toy.h"
#include "tide/sim.h"
#include "tide/verify.h"

namespace tide {
namespace {

using testing::AllGathers;
using testing::Layer;
using testing::ReduceScatters;
using testing::Toy;
using testing::WholeLayer;

constexpr int kMostRanks = 16;

std::vector<Topology> Topologies() {
  std::vector<Topology> all;
  for (int nodes = 1; nodes <= kMostRanks; ++nodes) {
    for (int local = 1; nodes * local <= kMostRanks; ++local) {
      if (nodes * local > 1) all.push_back({nodes, local});
    }
  }
  return all;
}

std::string ToText(const Topology& topology) {
  return std::to_string(topology.nodes) + " x " + std::to_string(topology.local_ranks);
}

std::vector<ReduceScatterOptions> EveryPlan() {
  std::vector<ReduceScatterOptions> plans;
  for (const Placement placement : {Placement::kDirect, Placement::kLatinSquare}) {
    for (const Mode mode : {Mode::kInPlace, Mode::kSlotReuse}) {
      ReduceScatterOptions& options = plans.emplace_back();
      options.placement = placement;
      options.mode = mode;
    }
  }
  return plans;
}

using Visit = std::function<void(const std::vector<Program>&, const std::string&)>;

// Every collective of every topology, each plan of the reduce-scatter apart.
void ForEachCollective(const std::vector<Topology>& topologies, const Visit& visit) {
  for (const Topology& topology : topologies) {
    visit(AllGathers(topology), "all-gather, " + ToText(topology));
    for (const ReduceScatterOptions& options : EveryPlan()) {
      visit(ReduceScatters(topology, options), std::string("reduce-scatter, ") +
                                                   Name(options.placement) + ", " +
                                                   Name(options.mode) + ", " + ToText(topology));
    }
  }
}

// Bytes that leave or enter each rank, by its operations: NVLink and rails.
struct Traffic {
  std::map<int, double> link_out, link_in, rail_out, rail_in;
};

Traffic TrafficOf(const std::vector<Program>& programs) {
  Traffic traffic;
  for (const Program& program : programs) {
    const int own = program.rank;
    const Topology& topology = program.topology;
    const auto link = [&](int from, int to, int64_t bytes) {
      if (from == to) return;
      traffic.link_out[from] += static_cast<double>(bytes);
      traffic.link_in[to] += static_cast<double>(bytes);
    };
    for (const Operation& op : program.operations) {
      for (const Piece& piece : op.pieces) {
        if (op.kind == OpKind::kCopy) link(own, op.peer, piece.rows * piece.row_bytes);
        if (op.kind != OpKind::kMulticast) continue;
        for (int l = 0; l < topology.local_ranks; ++l) {
          link(own, topology.Rank(topology.Node(own), l), piece.rows * piece.row_bytes);
        }
      }
      for (const PutPiece& put : op.puts) {
        traffic.rail_out[own] += static_cast<double>(put.bytes);
        traffic.rail_in[op.peer] += static_cast<double>(put.bytes);
      }
      // A landing reads the blocks of all local ranks.
      for (const LandPiece& land : op.lands) {
        for (int l = 0; l < topology.local_ranks; ++l) {
          link(topology.Rank(topology.Node(own), l), own, land.elems * 4);
        }
      }
    }
  }
  return traffic;
}

TEST(Collectives, EveryByteIsMovedOnceAndByItsOwnLink) {
  ForEachCollective({{1, 3}, {3, 1}, {2, 2}, {3, 2}, {5, 3}}, [](const auto& programs,
                                                                 const std::string& name) {
    SCOPED_TRACE(name);
    Traffic expected = TrafficOf(programs);
    const SimulationResult result = Simulate(programs, Toy(), {});
    const std::map<std::string, std::map<int, double>*> known = {{"NVLink out", &expected.link_out},
                                                                 {"NVLink in", &expected.link_in},
                                                                 {"rail out", &expected.rail_out},
                                                                 {"rail in", &expected.rail_in}};
    for (const SimulatedResource& resource : result.resources) {
      EXPECT_GT(resource.busy_s, 0);
      EXPECT_LE(resource.busy_s, result.seconds);
      EXPECT_LE(resource.share_of, 1.0000001) << resource.name;
      const auto found = known.find(resource.name);
      if (found == known.end()) continue;
      double& bytes = (*found->second)[resource.rank];
      EXPECT_NEAR(resource.bytes, bytes, 100) << resource.name << " of rank " << resource.rank;
      bytes = 0;
    }
    for (const auto& [resource, ranks] : known) {
      for (const auto& [rank, left] : *ranks) EXPECT_EQ(left, 0) << resource << rank;
    }
  });
}

TEST(Collectives, EveryTopologyRunsToItsEnd) {
  ForEachCollective(Topologies(), [](const auto& programs, const std::string& name) {
    SCOPED_TRACE(name);
    const SimulationResult result = Simulate(programs, Toy(), {});
    // No faster than the busiest link would be alone.
    for (const SimulatedResource& resource : result.resources) {
      EXPECT_LE(resource.share_of, 1.0000001);
    }
    for (const double seconds : result.rank_seconds) EXPECT_GT(seconds, 0);
  });
}

TEST(Collectives, RepeatToTheBit) {
  ForEachCollective({{2, 4}, {5, 2}}, [](const auto& programs, const std::string& name) {
    const SimulationResult one = Simulate(programs, Toy(), {});
    const SimulationResult two = Simulate(programs, Toy(), {});
    EXPECT_EQ(one.rank_seconds, two.rank_seconds) << name;
    EXPECT_EQ(one.timeline.size(), two.timeline.size());
  });
}

TEST(Collectives, ABetterMachineIsNeverSlower) {
  const std::vector<std::pair<std::string, double MachineModel::*>> rates = {
      {"nvlink", &MachineModel::nvlink_gb_per_s},
      {"hbm", &MachineModel::hbm_gb_per_s},
      {"local copies", &MachineModel::local_copy_gb_per_s},
      {"pitched copies", &MachineModel::local_pitched_gb_per_s},
      {"rails", &MachineModel::nic_gb_per_s}};
  const std::vector<std::pair<std::string, double MachineModel::*>> times = {
      {"batch", &MachineModel::batch_us},
      {"copy", &MachineModel::copy_us},
      {"signal", &MachineModel::signal_us},
      {"flight", &MachineModel::signal_flight_us},
      {"wait", &MachineModel::wait_us},
      {"event", &MachineModel::event_us},
      {"kernel", &MachineModel::kernel_us},
      {"put", &MachineModel::put_us},
      {"put flight", &MachineModel::put_flight_us},
      {"put wait", &MachineModel::put_wait_us}};
  ForEachCollective(
      {{1, 4}, {4, 1}, {2, 2}, {3, 3}}, [&](const auto& programs, const std::string& name) {
        const double before = Simulate(programs, Toy(), {}).seconds;
        const auto expect_no_slower = [&](MachineModel machine, const std::string& what) {
          EXPECT_LE(Simulate(programs, machine, {}).seconds, before * (1 + 1e-9))
              << name << ", better " << what;
        };
        for (const auto& [what, member] : rates) {
          MachineModel machine = Toy();
          machine.*member *= 2;
          expect_no_slower(machine, what);
        }
        for (const auto& [what, member] : times) {
          MachineModel machine = Toy();
          machine.*member /= 2;
          expect_no_slower(machine, what);
        }
      });
}

TEST(Collectives, TheWireIsTheFloor) {
  for (const Topology topology : {Topology{1, 2}, {1, 8}, {4, 1}, {4, 2}}) {
    const GroupLayout layout = Layer(topology);
    double shard = 0;
    for (const ParamLayout& param : layout.params()) {
      shard += static_cast<double>(param.shard_bytes);
    }
    const double link = (topology.Ranks() - topology.nodes) * shard / 100e9;
    const double rail = (topology.nodes - 1) * shard / 40e9;
    const double seconds = Simulate(AllGathers(topology), Toy(), {}).seconds;
    EXPECT_GE(seconds, std::max(link, rail)) << ToText(topology);
    EXPECT_LE(seconds, link + rail + 1e-3) << ToText(topology);
  }
}

// Pacing is judged here: it costs time on a network that nothing else disturbs, and what is proved
// correct without it moves the same bytes.
TEST(Collectives, PacingChangesTheTimeAlone) {
  const Topology topology{8, 2};
  AllGatherOptions options;
  options.head_bytes = 0;  // a round is confirmed when all of it has arrived
  const auto programs = AllGathers(topology, options);
  const SimulationResult paced = Simulate(programs, Toy(), {});
  SimulationOptions free;
  free.pacing = false;
  const SimulationResult unpaced = Simulate(programs, Toy(), free);
  EXPECT_LT(unpaced.seconds, paced.seconds);
  ASSERT_EQ(unpaced.resources.size(), paced.resources.size());
  for (size_t r = 0; r < paced.resources.size(); ++r) {
    EXPECT_NEAR(unpaced.resources[r].bytes, paced.resources[r].bytes, 100);
  }
  VerifySetup setup;
  setup.topology = topology;
  setup.all_gather = options;
  setup.groups = {{Layer(topology), std::vector<DType>(3, DType::kBF16), WholeLayer()}};
  EXPECT_TRUE(VerifyAllGather(setup, {}).ok());
}

TEST(Collectives, ALateRankHoldsUpEveryone) {
  const auto programs = AllGathers({4, 2});
  SimulationOptions options;
  options.ready_s.assign(8, 0);
  options.ready_s[3] = 1;
  const SimulationResult late = Simulate(programs, Toy(), options);
  const double alone = Simulate(programs, Toy(), {}).seconds;
  for (const double seconds : late.rank_seconds) EXPECT_GT(seconds, 1);
  EXPECT_LT(late.seconds, 1 + alone + 1e-4);
}

TEST(Collectives, MoreCtasMakeTheSumFaster) {
  const auto programs = ReduceScatters({1, 4});
  double before = 0;
  for (const int ctas : {4, 2, 1}) {
    SimulationOptions options;
    options.sum_ctas = ctas;
    const double seconds = Simulate(programs, Toy(), options).seconds;
    EXPECT_GT(seconds, before);
    before = seconds;
  }
}

TEST(Collectives, InterruptsAreLookedForAtEveryRank) {
  const char* request = R"({
    "groups": [{"name": "g", "params": [{"name": "w", "rows": 64, "row_elems": 64, "dtype": "bf16"}]}],
    "nodes": 4, "local_ranks": 2, "machine": "h200"})";
  const auto asked = [&](const char* operation) {
    int times = 0;
    SimulationReportOptions options;
    options.simulation.check_interrupt = [&times] { ++times; };
    SimulationReport(request, operation, options);
    return times;
  };
  EXPECT_GT(asked("all-gather"), 2 * 8);      // planned, then translated
  EXPECT_GT(asked("reduce-scatter"), 3 * 8);  // and while a rank's is planned
}

}  // namespace
}  // namespace tide
