// Class Communicator of the module, and the segments it gives.
#include "communicator.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "nccl.h"
#include "python_segments.h"
#include "signals.h"
#include "tide/communicator.h"
#include "tide/config.h"
#include "tide/error.h"
#include "tide/plan.h"

namespace nb = nanobind;

namespace {

using Pointers = std::vector<uintptr_t>;
using ParamTuple = std::tuple<std::string, int64_t, int64_t, int>;

// Exchanges bytes through a Python callable, typically an all-gather over the caller's process
// group.
class PythonBootstrap final : public tide::Bootstrap {
 public:
  PythonBootstrap(int rank, int world, nb::callable exchange)
      : rank_(rank), world_(world), exchange_(std::move(exchange)) {}
  int rank() const override { return rank_; }
  int world() const override { return world_; }
  std::vector<std::string> AllGather(const std::string& mine) override {
    const nb::gil_scoped_acquire gil;
    std::vector<std::string> all;
    for (const nb::handle item : exchange_(nb::bytes(mine.data(), mine.size()))) {
      const auto bytes = nb::cast<nb::bytes>(item);
      all.emplace_back(bytes.c_str(), bytes.size());
    }
    if (static_cast<int>(all.size()) != world_) {
      throw tide::Error(tide::ErrorCode::kInvalidArgument, "exchange: expected one entry a rank, " +
                                                               std::to_string(world_) + ", got " +
                                                               std::to_string(all.size()));
    }
    return all;
  }

 private:
  int rank_;
  int world_;
  nb::callable exchange_;
};

tide::DType ToDType(int value) {
  if (value < 0 || value > static_cast<int>(tide::DType::kF32)) {
    throw tide::Error(tide::ErrorCode::kInvalidArgument,
                      "expected a dtype in [0, 3], got " + std::to_string(value));
  }
  return static_cast<tide::DType>(value);
}

std::vector<tide::DType> ToDTypes(const std::vector<int>& values) {
  std::vector<tide::DType> dtypes;
  dtypes.reserve(values.size());
  for (const int value : values) dtypes.push_back(ToDType(value));
  return dtypes;
}

std::vector<const void*> ToPointers(const Pointers& addresses) {
  std::vector<const void*> pointers;
  pointers.reserve(addresses.size());
  for (const uintptr_t address : addresses)
    pointers.push_back(reinterpret_cast<const void*>(address));
  return pointers;
}

std::optional<void*> ToStream(std::optional<uintptr_t> stream) {
  if (!stream) return std::nullopt;
  return reinterpret_cast<void*>(*stream);  // 0 is CUDA's default stream
}

tide::AllGatherCall MakeAllGather(int group, const Pointers& shards,
                                  const std::vector<int>& shard_dtypes, int segment, int64_t offset,
                                  std::optional<uintptr_t> stream,
                                  std::optional<uintptr_t> ready_stream) {
  return {group,
          ToPointers(shards),
          ToDTypes(shard_dtypes),
          {segment, offset},
          ToStream(stream),
          ToStream(ready_stream)};
}

tide::ReduceScatterCall MakeReduceScatter(int group, const std::vector<int>& params,
                                          const Pointers& grads,
                                          const std::vector<int>& grad_dtypes, uintptr_t output,
                                          int output_dtype, float scale, bool accumulate,
                                          std::optional<uintptr_t> stream) {
  return {group,
          params,
          ToPointers(grads),
          ToDTypes(grad_dtypes),
          reinterpret_cast<void*>(output),
          ToDType(output_dtype),
          scale,
          accumulate,
          ToStream(stream)};
}

// Hands a share of the segment to code without Python: a context and the function that gives it
// back.
void ReleaseLease(void* context) { delete static_cast<std::shared_ptr<void>*>(context); }

std::pair<uintptr_t, uintptr_t> Lease(const tide::SegmentView& segment) {
  auto* context = new std::shared_ptr<void>(segment.owner);
  return {reinterpret_cast<uintptr_t>(context), reinterpret_cast<uintptr_t>(&ReleaseLease)};
}

// The communicator, closable before its Python object dies.
class PyCommunicator {
 public:
  PyCommunicator(int rank, int world, nb::callable exchange, double timeout, int nodes,
                 const std::string& mode, bool share_segments, tide::FabricKind fabric, int device,
                 nb::object allocate, nb::object free_cached, const Pointers& compute_streams,
                 int sum_ctas)
      : bootstrap_(std::make_unique<PythonBootstrap>(rank, world, std::move(exchange))),
        segments_(std::make_unique<PythonSegments>(std::move(allocate), std::move(free_cached))) {
    tide::CommunicatorOptions options = tide::OptionsFromEnvironment(fabric);
    options.timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double>(timeout));
    if (nodes > 0) options.nodes = nodes;
    options.reduce_scatter.mode = tide::ParseMode(mode);
    options.share_segments = share_segments;
    options.device = device;
    if (sum_ctas > 0) options.sum_ctas = sum_ctas;
    for (const uintptr_t stream : compute_streams) {
      options.compute_streams.push_back(reinterpret_cast<void*>(stream));
    }
    options.allocate_segment = [segments = segments_.get()](int64_t bytes) {
      return segments->Allocate(bytes);
    };
    options.free_cached_memory = [segments = segments_.get()] { segments->FreeCached(); };
    options.check_interrupt = &CheckSignals;
    {
      const nb::gil_scoped_release release;
      communicator_ = MakeCommunicator(*bootstrap_, options);
    }
    // Only the nccl fabric goes on using them.
    if (fabric == tide::FabricKind::kHost) ForgetCallables();
  }
  // Leaving may take seconds, in which other threads go on.
  ~PyCommunicator() {
    const nb::gil_scoped_release release;
    End();
  }
  PyCommunicator(const PyCommunicator&) = delete;
  PyCommunicator& operator=(const PyCommunicator&) = delete;
  tide::Communicator& get() {
    if (!communicator_)
      throw tide::Error(tide::ErrorCode::kInvalidArgument, "the communicator is closed");
    return *communicator_;
  }
  void Close() {
    End();
    const nb::gil_scoped_acquire gil;
    ForgetCallables();
  }

 private:
  // A forked child has its parent's communicator, but none of its threads, and would end it for the
  // parent: there it stays.
  void End() {
    if (getpid() != creator_) static_cast<void>(communicator_.release());
    communicator_.reset();
  }

  // What they refer to may hold this object, a cycle that Python can't see, and segments.
  void ForgetCallables() {
    bootstrap_.reset();
    segments_.reset();
  }

  const pid_t creator_ = getpid();
  // Outlive the communicator.
  std::unique_ptr<PythonBootstrap> bootstrap_;
  std::unique_ptr<PythonSegments> segments_;
  std::unique_ptr<tide::Communicator> communicator_;
};

nb::list TakeTrace(PyCommunicator& self) {
  nb::list spans;
  for (const tide::TraceSpan& span : self.get().TakeTrace()) {
    nb::dict item;
    item["name"] = span.name;
    item["operation"] = span.operation;
    item["group"] = span.group;
    item["call"] = span.call;
    item["start_s"] = span.start;
    item["end_s"] = span.end;
    spans.append(item);
  }
  return spans;
}

// Bytes a rank by region, banks and generations multiplied out.
nb::dict Regions(PyCommunicator& self) {
  const tide::RegionBytes& bytes = self.get().regions();
  nb::dict regions;
  regions["stage"] = bytes.stage;
  regions["staging"] = bytes.staging;
  regions["outbox"] = 2 * bytes.outbox;
  regions["spare"] = 2 * bytes.spare;
  regions["inbox"] = bytes.generations * bytes.inbox;
  regions["accumulator"] = bytes.accumulator;
  return regions;
}

// `run` is the collective itself or its floor.
void BindAllGather(nb::class_<PyCommunicator>& communicator, const char* name,
                   void (tide::Communicator::*run)(const tide::AllGatherCall&)) {
  communicator.def(
      name,
      [run](PyCommunicator& self, int group, const Pointers& shards,
            const std::vector<int>& shard_dtypes, int segment, int64_t offset,
            std::optional<uintptr_t> stream, std::optional<uintptr_t> ready_stream, bool refresh) {
        auto call =
            MakeAllGather(group, shards, shard_dtypes, segment, offset, stream, ready_stream);
        call.refresh = refresh;
        const nb::gil_scoped_release release;
        (self.get().*run)(call);
      },
      nb::arg("group"), nb::arg("shards"), nb::arg("shard_dtypes"), nb::arg("segment"),
      nb::arg("offset"), nb::arg("stream") = nb::none(), nb::arg("ready_stream") = nb::none(),
      nb::arg("refresh") = false);
}

void BindReduceScatter(nb::class_<PyCommunicator>& communicator, const char* name,
                       void (tide::Communicator::*run)(const tide::ReduceScatterCall&)) {
  communicator.def(
      name,
      [run](PyCommunicator& self, int group, const std::vector<int>& params, const Pointers& grads,
            const std::vector<int>& grad_dtypes, uintptr_t output, int output_dtype, float scale,
            bool accumulate, std::optional<uintptr_t> stream) {
        const auto call = MakeReduceScatter(group, params, grads, grad_dtypes, output, output_dtype,
                                            scale, accumulate, stream);
        const nb::gil_scoped_release release;
        (self.get().*run)(call);
      },
      nb::arg("group"), nb::arg("params"), nb::arg("grads"), nb::arg("grad_dtypes"),
      nb::arg("output"), nb::arg("output_dtype"), nb::arg("scale"), nb::arg("accumulate"),
      nb::arg("stream") = nb::none());
}

void BindCollectives(nb::class_<PyCommunicator>& communicator) {
  using tide::Communicator;
  BindAllGather(communicator, "all_gather", &Communicator::AllGather);
  BindAllGather(communicator, "unsynchronised_all_gather", &Communicator::UnsynchronisedAllGather);
  BindReduceScatter(communicator, "reduce_scatter", &Communicator::ReduceScatter);
  BindReduceScatter(communicator, "unsynchronised_reduce_scatter",
                    &Communicator::UnsynchronisedReduceScatter);
  communicator.def(
      "barrier", [](PyCommunicator& self) { self.get().Barrier(); },
      nb::call_guard<nb::gil_scoped_release>());
}

void BindSetUp(nb::class_<PyCommunicator>& communicator) {
  communicator
      .def(nb::init<int, int, nb::callable, double, int, const std::string&, bool, tide::FabricKind,
                    int, nb::object, nb::object, const Pointers&, int>(),
           nb::arg("rank"), nb::arg("world"), nb::arg("exchange"), nb::arg("timeout"),
           nb::arg("nodes") = 0, nb::arg("mode") = "in_place", nb::arg("share_segments") = true,
           nb::arg("fabric") = tide::FabricKind::kHost, nb::arg("device") = -1,
           nb::arg("allocate") = nb::none(), nb::arg("free_cached") = nb::none(),
           nb::arg("compute_streams") = Pointers(), nb::arg("sum_ctas") = 0)
      .def(
          "add_segment",
          [](PyCommunicator& self, int64_t bytes, const std::string& label,
             tide::SegmentKind kind) { return self.get().AddSegment(bytes, label, kind); },
          nb::arg("bytes"), nb::arg("label"), nb::arg("kind") = tide::SegmentKind::kPerRank,
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "reserve",
          [](PyCommunicator& self,
             const std::vector<std::tuple<int, std::vector<int>, std::vector<int>, int>>& needs) {
            std::vector<tide::GroupNeed> groups;
            groups.reserve(needs.size());
            for (const auto& [group, params, grads, output] : needs) {
              groups.push_back({group, params, ToDTypes(grads), ToDType(output)});
            }
            self.get().Reserve(groups);
          },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "register_group",
          [](PyCommunicator& self, const std::string& name, const std::vector<ParamTuple>& params) {
            std::vector<tide::ParamShape> shapes;
            shapes.reserve(params.size());
            for (const auto& [param, rows, row_elems, dtype] : params) {
              shapes.push_back({param, rows, row_elems, ToDType(dtype)});
            }
            return self.get().RegisterGroup(name, shapes);
          })
      .def("landing_bytes",
           [](PyCommunicator& self, int group) { return self.get().layout(group).landing_bytes(); })
      .def("landing_offsets",
           [](PyCommunicator& self, int group) {
             std::vector<int64_t> offsets;
             const auto& params = self.get().layout(group).params();
             offsets.reserve(params.size());
             for (const auto& param : params) offsets.push_back(param.landing_offset);
             return offsets;
           })
      .def("close", &PyCommunicator::Close, nb::call_guard<nb::gil_scoped_release>());
}

// What it is, and what its calls did.
void BindProperties(nb::class_<PyCommunicator>& communicator) {
  communicator.def_prop_ro("rank", [](PyCommunicator& self) { return self.get().rank(); })
      .def_prop_ro("world", [](PyCommunicator& self) { return self.get().topology().Ranks(); })
      .def_prop_ro("nodes", [](PyCommunicator& self) { return self.get().topology().nodes; })
      .def_prop_ro("local_ranks",
                   [](PyCommunicator& self) { return self.get().topology().local_ranks; })
      .def_prop_ro("regions", &Regions)
      .def_prop_ro("unshared_reason",
                   [](PyCommunicator& self) { return self.get().unshared_reason(); })
      .def_prop_ro("unwatched_reason",
                   [](PyCommunicator& self) { return self.get().unwatched_reason(); })
      .def_prop_ro("aliased_streams",
                   [](PyCommunicator& self) { return self.get().aliased_streams(); })
      .def_prop_ro("unicast_reason",
                   [](PyCommunicator& self) { return self.get().unicast_reason(); })
      .def_prop_ro("poisoned", [](PyCommunicator& self) { return self.get().poisoned(); })
      .def("last_call",
           [](PyCommunicator& self) {
             nb::dict times;
             times["total_s"] = self.get().last_call().total;
             times["wait_s"] = self.get().last_call().wait;
             return times;
           })
      .def("trace", [](PyCommunicator& self, bool enable) { self.get().EnableTrace(enable); })
      .def("take_trace", &TakeTrace);
}

}  // namespace

void BindCommunicator(nb::module_& m) {
  nb::enum_<tide::SegmentKind>(m, "SegmentKind")
      .value("PER_RANK", tide::SegmentKind::kPerRank)
      .value("NODE_SHARED", tide::SegmentKind::kNodeShared);
  nb::class_<tide::SegmentView>(m, "Segment")
      .def_ro("id", &tide::SegmentView::id)
      .def_ro("kind", &tide::SegmentView::kind)
      .def_ro("bytes", &tide::SegmentView::bytes)
      .def_prop_ro(
          "address",
          [](const tide::SegmentView& self) { return reinterpret_cast<uintptr_t>(self.address); })
      .def("lease", &Lease);
  nb::class_<PyCommunicator> communicator(m, "Communicator");
  BindSetUp(communicator);
  BindProperties(communicator);
  BindCollectives(communicator);
}
