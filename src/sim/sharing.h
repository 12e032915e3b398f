// How transfers that run at the same time share links, memory and multiprocessors.
//
// Rates are max-min fair: the rates of all flows rise together, and a flow stops rising when it
// reaches its own limit or when something that it uses is full. So a slow link slows down only what
// crosses it, and what a limited flow leaves over goes to the others. Rates change when a flow
// starts or ends, at no other time.
#ifndef TIDE_SIM_SHARING_H_
#define TIDE_SIM_SHARING_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tide::sim {

// What every rank has of its own. Units: bytes a second, multiprocessors for kSms.
enum class ResourceKind : uint8_t { kLinkOut, kLinkIn, kMemory, kSms, kRailOut, kRailIn };
inline constexpr int kResourceKinds = 6;
// Of `rank`: an index.
constexpr int ResourceOf(int rank, ResourceKind kind) {
  return rank * kResourceKinds + static_cast<int>(kind);
}
constexpr ResourceKind KindOf(int resource) {
  return static_cast<ResourceKind>(resource % kResourceKinds);
}

// A flow at rate r takes r * per_byte of the resource.
struct Use {
  int resource = 0;
  double per_byte = 1;
};

struct Flow {
  double bytes = 0;
  double limit = 0;  // bytes a second, alone on the machine
  std::vector<Use> uses;
};

// Seconds in which a kind of resource, or the flow's own limit (the last entry), set the rate.
using LimitedBy = std::array<double, kResourceKinds + 1>;

struct ResourceTime {
  double busy = 0;    // seconds in which somebody used it
  double amount = 0;  // bytes, or multiprocessor seconds
};

class Sharing {
 public:
  explicit Sharing(std::vector<double> capacities);

  // Time does not run backwards from call to call.
  void Start(int id, const Flow& flow, double now);
  // When the next flow ends if none starts before; infinity if there is none.
  double NextEnd();
  struct Ended {
    int id = 0;
    LimitedBy limited{};
  };
  // The flows that have ended by `now`, in the order of their starts.
  std::vector<Ended> Finish(double now);

  const std::vector<ResourceTime>& resources() const { return times_; }

 private:
  struct Active {
    int id = 0;
    const Flow* flow = nullptr;
    double left = 0;  // bytes
    double rate = 0;
    int limited_by = 0;  // index into LimitedBy
    LimitedBy limited{};
  };

  void Settle(double now);
  void Share();
  double Level(const std::vector<size_t>& open) const;
  // What stops the flow at this level, as an index into LimitedBy; -1: nothing yet.
  int StoppedBy(const Active& active, double level) const;

  const std::vector<double> capacities_;
  std::vector<Active> active_;
  double settled_ = 0;
  double next_end_ = 0;
  bool stale_ = true;  // rates
  std::vector<ResourceTime> times_;
  // By resource, of the filling under way.
  std::vector<double> used_;
  std::vector<double> weight_;
  std::vector<int> rising_;  // flows
  std::vector<int> touched_;
};

}  // namespace tide::sim

#endif  // TIDE_SIM_SHARING_H_
